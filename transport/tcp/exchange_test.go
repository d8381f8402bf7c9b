package tcp

import (
	"testing"
	"time"
)

func TestIsSlow(t *testing.T) {
	for _, c := range []struct {
		what   string
		bytes  uint64
		waited time.Duration
		want   bool
	}{
		{"1 Gbit/s", 64 << 10, 524 * time.Microsecond, true},
		{"10 Gbit/s", 256 << 10, 210 * time.Microsecond, false},
		{"a short pause", 4, 50 * time.Microsecond, false},
		{"nothing came", 0, 5 * time.Millisecond, true},
		{"a fast peer that began late", 256 << 10, 500 * time.Microsecond, false},
	} {
		if got := isSlow(c.bytes, c.waited); got != c.want {
			t.Errorf("%s: %d bytes in %v are slow: %v, want %v", c.what, c.bytes, c.waited, got, c.want)
		}
	}
}
