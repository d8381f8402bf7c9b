package status

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/timeline"
)

// TestThinning: of too many measurements every second is dropped, but no validation, unless those are too many.
func TestThinning(t *testing.T) {
	validated := func(m timeline.Measurement) bool { return len(m.Validation) > 0 }
	for _, c := range []struct{ every, want, validations int }{
		{0, 1001, 0},
		{9, 1112, 223},
		{1, 1001, 1001},
	} {
		var list []timeline.Measurement
		for i := range pointsKept + 1 {
			m := timeline.Measurement{Step: int64(i)}
			if c.every > 0 && i%c.every == 0 {
				m.Validation = map[string]float64{"loss": 1}
			}
			list = append(list, m)
		}
		kept := everySecond(list, validated)
		n := 0
		for i, m := range kept {
			if validated(m) {
				n++
			}
			if i > 0 && kept[i-1].Step >= m.Step {
				t.Fatalf("step %d after %d", m.Step, kept[i-1].Step)
			}
		}
		if len(kept) != c.want || n != c.validations {
			t.Errorf("a validation every %d steps: %d measurements and %d validations are left, want %d and %d", c.every,
				len(kept), n, c.want, c.validations)
		}
	}
}

// TestListsInJSON: the lists of a job are lists in JSON too, also of one in which nothing has happened.
func TestListsInJSON(t *testing.T) {
	text, err := json.Marshal(NewTracker("digits", nil).Job())
	if err != nil || !strings.Contains(string(text), `"events":[]`) || !strings.Contains(string(text), `"workers":[]`) {
		t.Errorf("%s, %v", text, err)
	}
}
