package units

import "testing"

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 4 << 20: "4 MiB", 3 << 29: "1.5 GiB", 1 << 40: "1 TiB", 1 << 50: "1024 TiB",
	} {
		if int64(int(n)) != n {
			continue // 32-bit platforms
		}
		if got := Bytes(int(n)); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
