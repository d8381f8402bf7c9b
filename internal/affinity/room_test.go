package affinity

import (
	"testing"
	"time"
)

// TestRoom: it is decided anew, at most once a second, after the CPUs of the process or the limits of its control
// groups have changed.
func TestRoom(t *testing.T) {
	r := NewRoom(1)
	_, limited := least(Limits())
	if !limited && !r.Enough(time.Now()) {
		t.Error("no CPU for one rank")
	}
	if NewRoom(ListMax + 1).Enough(time.Now()) {
		t.Errorf("a CPU for each of %d ranks", ListMax+1)
	}
	want := r.Enough(time.Now())
	later := time.Now().Add(time.Hour)
	r.enough.Store(!want) // as if other CPUs had been found before
	if r.Enough(later); r.enough.Load() == want {
		t.Error("decided anew although nothing has changed")
	}
	r.limit = []Limit{{Group: 1, CPUs: 1 << 20}} // as if a limit had been lifted since
	if r.Enough(later.Add(roomEvery / 2)); r.enough.Load() == want {
		t.Error("decided anew within a second")
	}
	if got := r.Enough(later.Add(2 * roomEvery)); got != want {
		t.Errorf("after the limit has changed: %v, want %v", got, want)
	}
	if n := testing.AllocsPerRun(100, func() { r.Enough(later) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
