package mixed

import "testing"

// FuzzRegistrations: whatever the registrations of two other processes say, it is refused or makes a layout in which
// everybody has a place.
func FuzzRegistrations(f *testing.F) {
	f.Add([]byte(`{"ranks":[1],"size":3,"addr":"h:1","host":"x"}`),
		[]byte(`{"ranks":[2],"size":3,"addr":"h:2","host":"x"}`))
	f.Add([]byte(`{"ranks":[1,2],"size":3,"addr":"h:0"}`), []byte(`{"size":3,"addr":"[::1]:2"}`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		mine := registration{Ranks: []int{0}, Size: 3, Addr: "h:0"}
		registrations := []registration{mine}
		for _, text := range [][]byte{a, b} {
			c, err := parseRegistration(text)
			if err != nil {
				return
			}
			registrations = append(registrations, c)
		}
		l, err := newLayout(&mine, registrations)
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
		if n != mine.Size || len(l.addrs) != n {
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
		registrations := []registration{
			{Ranks: []int{0}, Size: 3, Addr: "h:0", Host: "x", Processors: test.first},
			{Ranks: []int{1}, Size: 3, Addr: "h:1", Host: "x", Processors: test.second},
			{Ranks: []int{2}, Size: 3, Addr: "g:0", Host: "y", Processors: test.other},
		}
		for i := range registrations {
			if l, err := newLayout(&registrations[i], registrations); err != nil || l.processors != test.want {
				t.Errorf("%+v: process %d counts %d processors, want %d (%v)", test, i, l.processors, test.want, err)
			}
		}
	}
}
