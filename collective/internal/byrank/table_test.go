package byrank

import (
	"math/rand/v2"
	"testing"
)

// TestTable compares tables with maps, for random ranks.
func TestTable(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	tables, maps := [2]Table[int]{}, [2]map[int]int{{}, {}}
	for range 2000 {
		i, rank := random.IntN(2), random.IntN(1000)
		switch random.IntN(10) {
		case 0:
			tables[i].Set(&tables[1-i])
			clear(maps[i])
			for r, v := range maps[1-i] {
				maps[i][r] = v
			}
		case 1, 2, 3:
			*tables[i].At(rank) += rank + 1
			maps[i][rank] += rank + 1
		}
		if got, want := tables[i].Get(rank), maps[i][rank]; got != want {
			t.Fatalf("rank %d: %d, want %d", rank, got, want)
		}
	}
	for i := range tables {
		for rank := range 1100 {
			if got, want := tables[i].Get(rank), maps[i][rank]; got != want {
				t.Fatalf("table %d, rank %d: %d, want %d", i, rank, got, want)
			}
		}
	}
}

// TestAllocations checks that only the first use of a page allocates.
func TestAllocations(t *testing.T) {
	var a, b Table[int]
	if n := testing.AllocsPerRun(100, func() { _ = a.Get(4095) }); n != 0 {
		t.Errorf("Get of an empty table: %v allocations", n)
	}
	*a.At(4095) = 1
	b.Set(&a)
	if n := testing.AllocsPerRun(100, func() { *a.At(4064)++; b.Set(&a) }); n != 0 {
		t.Errorf("a page in use: %v allocations", n)
	}
	pages := 0
	for _, p := range b.pages {
		if p != nil {
			pages++
		}
	}
	if pages != 1 {
		t.Errorf("%d pages for one rank", pages)
	}
}
