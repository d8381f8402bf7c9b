//go:build unix

package main

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// limitFindings returns the limits of the system that can affect a job.
func limitFindings() []finding {
	var out []finding
	for _, l := range []struct {
		name, about string
		which       int
		enough      uint64
		text        func(int) string
	}{
		{"open files", "a rank opens some for each peer", unix.RLIMIT_NOFILE, 1024, grouped},
		{"stack", "of the main thread", unix.RLIMIT_STACK, 1 << 20, formatBytes},
	} {
		var r unix.Rlimit
		if err := unix.Getrlimit(l.which, &r); err != nil {
			out = append(out, finding{"limits", l.name, false, err.Error()})
			continue
		}
		soft, hard := uint64(r.Cur), uint64(r.Max)
		text := fmt.Sprintf("%s, at most %s; %s", limitText(soft, l.text), limitText(hard, l.text), l.about)
		out = append(out, finding{"limits", l.name, soft >= l.enough, text})
	}
	return out
}

func limitText(n uint64, text func(int) string) string {
	if n >= 1<<62 {
		return "no limit"
	}
	return text(int(n))
}
