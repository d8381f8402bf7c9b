//go:build unix

package inspect

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/internal/units"
)

// limitFindings returns the limits of the system that can affect a job.
func limitFindings() []finding {
	var out []finding
	for _, l := range []struct {
		name, unit, about string
		which             int
		enough            uint64
		text              func(int) string
	}{
		{"open files", "count", "a rank opens some for each peer", unix.RLIMIT_NOFILE, 1024, cli.Grouped},
		{"stack", "bytes", "of the main thread", unix.RLIMIT_STACK, 1 << 20, units.Bytes},
	} {
		var r unix.Rlimit
		if err := unix.Getrlimit(l.which, &r); err != nil {
			out = append(out, finding{Topic: "limits", Name: l.name, Text: err.Error()})
			continue
		}
		soft, hard := uint64(r.Cur), uint64(r.Max)
		text := fmt.Sprintf("%s, at most %s; %s", limitText(soft, l.text), limitText(hard, l.text), l.about)
		values := map[string]any{l.unit: limitNumber(soft), "most_" + l.unit: limitNumber(hard)}
		out = append(out, finding{"limits", l.name, soft >= l.enough, text, values})
	}
	return out
}

func limitText(n uint64, text func(int) string) string {
	if n >= noLimit {
		return "no limit"
	}
	return text(int(n))
}

// limitNumber returns nil for no limit.
func limitNumber(n uint64) any {
	if n >= noLimit {
		return nil
	}
	return n
}

// noLimit is a number from which on a limit of the system is none.
const noLimit = 1 << 62
