package mixed

import "testing"

// FuzzCards: whatever the cards of two other processes say, it is refused or makes a layout in which everybody has a place.
func FuzzCards(f *testing.F) {
	f.Add([]byte(`{"ranks":[1],"size":3,"addr":"h:1","host":"x"}`), []byte(`{"ranks":[2],"size":3,"addr":"h:2","host":"x"}`))
	f.Add([]byte(`{"ranks":[1,2],"size":3,"addr":"h:0"}`), []byte(`{"size":3,"addr":"[::1]:2"}`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		mine := card{Ranks: []int{0}, Size: 3, Addr: "h:0"}
		cards := []card{mine}
		for _, text := range [][]byte{a, b} {
			c, err := parseCard(text)
			if err != nil {
				return
			}
			cards = append(cards, c)
		}
		l, err := newLayout(&mine, cards)
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
