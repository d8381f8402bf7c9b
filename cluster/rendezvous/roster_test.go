package rendezvous

import (
	"runtime"
	"strings"
	"testing"
)

// TestHostileRoster: a roster of many empty groups or members is refused before they take memory.
func TestHostileRoster(t *testing.T) {
	const elements = 2 << 20
	for name, c := range map[string]struct{ text, want string }{
		"groups": {
			`{"groups":[` + strings.Repeat("{},", elements) + `{}],"members":[0,1,3,0,2,4]}`,
			"it has more than 2 groups, the number of workers",
		},
		"members": {`{"groups":[{}],"members":[0` + strings.Repeat(",0", elements) + `]}`, "it has 2097153 numbers"},
		"no list": {`{"groups":{},"members":[0,1,3,0,2,4]}`, `its groups are "{}", want a list`},
		"nothing": {`{}`, "it has 1 numbers, want 3 for each of 2 workers"},
	} {
		t.Run(name, func(t *testing.T) {
			packed := pack([]byte(c.text))
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := unpackRoster(packed, 2)
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 {
				t.Errorf("%d MiB allocated for %d bytes of text", n>>20, len(c.text))
			}
		})
	}
}
