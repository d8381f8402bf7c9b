package rendezvous

import (
	"slices"
	"testing"
)

// TestCollectorsSpread: the collectors are not all on one host, whether workers are numbered host by host, in turn over
// the hosts, or in turn in groups.
func TestCollectorsSpread(t *testing.T) {
	for workers := collectorsMax + 1; workers <= 1200; workers++ {
		var all []int
		for i := 0; ; i++ {
			w, ok := collector(i, workers)
			if !ok {
				break
			}
			if len(all) > 0 && w <= all[len(all)-1] || w >= workers || !collects(w, workers) {
				t.Fatalf("%d workers: collector %d after %v", workers, w, all)
			}
			all = append(all, w)
		}
		if len(all) < 5 || len(all) > collectorsMax || all[0] != 0 {
			t.Fatalf("%d workers: collectors %v", workers, all)
		}
		for w := range workers {
			if collects(w, workers) != slices.Contains(all, w) {
				t.Fatalf("%d workers: worker %d and collectors %v", workers, w, all)
			}
		}
		for hosts := 2; hosts <= workers; hosts++ {
			if workers%hosts != 0 {
				continue
			}
			each := workers / hosts
			for _, group := range []int{1, 2, 4, 8, each} {
				if each%group != 0 {
					continue
				}
				used := map[int]bool{}
				for _, w := range all {
					used[w/group%hosts] = true
				}
				if len(used) < 2 {
					t.Errorf("%d workers on %d hosts in turn by %d: collectors %v on one host", workers, hosts, group, all)
				}
			}
		}
	}
}
