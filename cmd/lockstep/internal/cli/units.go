package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/internal/units"
)

// BytesValue is a flag for a size: "100MiB", "4K", "1000". It accepts decimal and binary prefixes.
type BytesValue int

// String implements pflag.Value.
func (b *BytesValue) String() string { return units.Bytes(int(*b)) }

// Type implements pflag.Value. It names the value in help texts.
func (b *BytesValue) Type() string { return "size" }

// Set implements pflag.Value.
func (b *BytesValue) Set(s string) error {
	n, err := ParseBytes(s)
	*b = BytesValue(n)
	return err
}

// byteUnits are the units of sizes, the longest names first.
var byteUnits = []struct {
	name  string
	bytes float64
}{
	{"KiB", 1 << 10},
	{"MiB", 1 << 20},
	{"GiB", 1 << 30},
	{"TiB", 1 << 40},
	{"kB", 1e3},
	{"KB", 1e3},
	{"MB", 1e6},
	{"GB", 1e9},
	{"TB", 1e12},
	{"K", 1 << 10},
	{"M", 1 << 20},
	{"G", 1 << 30},
	{"B", 1},
	{"", 1},
}

// bytesMax bounds a size, so that products fit into 64 bits.
const bytesMax = 1 << 50

// ParseBytes parses a size.
func ParseBytes(s string) (int, error) {
	for _, u := range byteUnits {
		number, ok := strings.CutSuffix(strings.TrimSpace(s), u.name)
		if !ok {
			continue
		}
		x, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if err != nil || !(x >= 0 && x*u.bytes <= bytesMax) {
			break
		}
		return int(x * u.bytes), nil
	}
	return 0, fmt.Errorf("%q is not a size: want a number with a unit such as 64KiB, 100MB or 4096", s)
}

// parseRate parses a rate in bytes or bits per second: "12.5GB/s", "100Gbit/s", "3GiB/s".
func parseRate(s string) (float64, error) {
	text, ok := strings.CutSuffix(s, "/s")
	if !ok {
		return 0, fmt.Errorf("%q is not a rate: want one such as 12.5GB/s or 100Gbit/s", s)
	}
	if bits, ok := strings.CutSuffix(text, "bit"); ok {
		n, err := ParseBytes(bits + "B")
		if err != nil {
			return 0, fmt.Errorf("%q is not a rate: want one such as 100Gbit/s", s)
		}
		return float64(n) / 8, nil
	}
	n, err := ParseBytes(text)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a rate: want one such as 12.5GB/s or 100Gbit/s", s)
	}
	return float64(n), nil
}

// RateValue is a flag for a rate.
type RateValue float64

// String implements pflag.Value.
func (r *RateValue) String() string { return FormatRate(float64(*r)) }

// Type implements pflag.Value. It names the value in help texts.
func (r *RateValue) Type() string { return "rate" }

// Set implements pflag.Value.
func (r *RateValue) Set(s string) error {
	x, err := parseRate(s)
	*r = RateValue(x)
	return err
}

// FormatRate formats a rate in decimal units, which [parseRate] accepts.
func FormatRate(x float64) string {
	unit := 0
	names := []string{"B/s", "kB/s", "MB/s", "GB/s", "TB/s"}
	for x >= 1000 && unit < len(names)-1 {
		x, unit = x/1000, unit+1
	}
	return strconv.FormatFloat(x, 'g', 4, 64) + names[unit]
}

// ParseLink parses "25us,12.5GB/s": a latency and a rate.
func ParseLink(s string) (latency time.Duration, rate float64, err error) {
	first, second, ok := strings.Cut(s, ",")
	if !ok {
		return 0, 0, fmt.Errorf("%q is not a link: want a latency and a rate, such as 25us,12.5GB/s", s)
	}
	if latency, err = time.ParseDuration(strings.TrimSpace(first)); err != nil || latency < 0 {
		return 0, 0, fmt.Errorf("%q is not a latency: want one such as 25us", first)
	}
	rate, err = parseRate(strings.TrimSpace(second))
	return latency, rate, err
}
