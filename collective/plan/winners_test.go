package plan

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// TestWinners compares the table of docs/algorithms.md that lists the algorithm of least cost, for links of a data
// centre: 25 µs and 10 Gb/s between hosts, and ranks of a host in one domain. On failure it prints the expected table.
func TestWinners(t *testing.T) {
	doc, err := os.ReadFile("../../docs/algorithms.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []Problem{{Op: AllReduce}, {Op: Reduce}, {Op: ReduceScatter}, {Op: Broadcast}, {Op: AllGather}} {
		if table := winners(p); !strings.Contains(string(doc), table) {
			t.Errorf("docs/algorithms.md lacks:\n%s", table)
		}
	}
}

func winners(p Problem) string {
	l := Links{
		Memory: Link{150 * time.Nanosecond, 12e9}, Host: Link{10 * time.Microsecond, 2e9},
		Network: Link{25 * time.Microsecond, 1.25e9},
		Combine: 30e9, Copy: 12e9, ElementBytes: 4,
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| %s | 1 KiB | 64 KiB | 1 MiB | 16 MiB | 256 MiB |\n|---|---|---|---|---|---|\n", p.Op)
	for _, c := range []struct{ hosts, ranks int }{
		{2, 1},
		{3, 1},
		{8, 1},
		{24, 1},
		{33, 1},
		{128, 1},
		{2, 4},
		{8, 4},
		{2, 3},
		{128, 8},
	} {
		sizes := make([]int, c.hosts)
		for i := range sizes {
			sizes[i] = c.ranks
		}
		p.Places, p.Size, p.Stage = shaped(sizes...), c.hosts*c.ranks, 8192
		fmt.Fprintf(&b, "| %d × %d |", c.hosts, c.ranks)
		for _, kib := range []int{1, 64, 1 << 10, 16 << 10, 256 << 10} {
			p.Count = kib << 10 / 4
			if p.Op == ReduceScatter || p.Op == AllGather {
				p.Count -= p.Count % p.Size
			}
			best, least := "", time.Duration(0)
			for _, a := range Algorithms {
				if a.Fits(p) != nil {
					continue
				}
				if cost := a.Cost(p, l); best == "" || cost < least {
					best, least = a.Name, cost
				}
			}
			fmt.Fprintf(&b, " %s |", best)
		}
		b.WriteString("\n")
	}
	return b.String()
}
