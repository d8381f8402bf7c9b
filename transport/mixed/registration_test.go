package mixed

import "testing"

// FuzzRegistrations: whatever the registrations of two other processes say, it is refused or makes a layout in which
// everybody has a place.
func FuzzRegistrations(f *testing.F) {
	f.Add([]byte(`{"ranks":[1],"addr":"h:1","settings":{"host":"x"}}`),
		[]byte(`{"ranks":[2],"addr":"h:2","settings":{"host":"x"}}`))
	f.Add([]byte(`{"ranks":[1,2],"addr":"h:0"}`), []byte(`{"addr":"[::1]:2"}`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		g := Group{Size: 3, Processes: []Process{{Ranks: []int{0}, Addr: "h:0"}}}
		for _, text := range [][]byte{a, b} {
			c, err := parseRegistration(text)
			if err != nil {
				return
			}
			g.Processes = append(g.Processes, c.Process)
		}
		l, err := newLayout(&g)
		if err != nil {
			return
		}
		n := 0
		for d, ranks := range l.domains {
			for _, r := range ranks {
				if l.places[r].Domain != d {
					t.Fatalf("rank %d of domain %d is at %+v", r, d, l.places[r])
				}
				n++
			}
		}
		if n != g.Size || len(l.addrs) != n {
			t.Fatalf("%d ranks in %+v", n, l)
		}
	})
}

// TestProcessors checks that all processes compute the same number of processors: of each host the largest number that
// a process of it knows, and of the hosts the smallest, which is unknown if one is.
func TestProcessors(t *testing.T) {
	for _, test := range []struct{ first, second, other, want int }{
		{2, 4, 8, 4},
		{4, 2, 3, 3},
		{2, 4, 0, 0},
		{0, 4, 8, 4},
	} {
		processes := []Process{
			{[]int{0}, "h:0", Settings{Host: "x", Processors: test.first}},
			{[]int{1}, "h:1", Settings{Host: "x", Processors: test.second}},
			{[]int{2}, "g:0", Settings{Host: "y", Processors: test.other}},
		}
		for i := range processes {
			l, err := newLayout(&Group{Size: 3, Processes: processes, Self: i})
			if err != nil || l.processors != test.want {
				t.Errorf("%+v: process %d counts %d processors, want %d (%v)", test, i, l.processors, test.want, err)
			}
		}
	}
}
