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
