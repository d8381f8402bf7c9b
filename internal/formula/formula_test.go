package formula

import "testing"

func TestThousands(t *testing.T) {
	for n, want := range map[int]string{
		0: "0", 12: "12", 123: "123", 1234: "1,234", 123456: "123,456", 1234567: "1,234,567", -123: "-123", -1234: "-1,234",
	} {
		if got := thousands(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
