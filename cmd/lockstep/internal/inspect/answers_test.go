package inspect

import (
	"slices"
	"sync/atomic"
	"testing"
)

// TestKnownAnswers: this processor computes the answer, and CPUs that compute another result, always or once, are
// named.
func TestKnownAnswers(t *testing.T) {
	if got := compute(0); got != answer {
		t.Fatalf("the answer is %#x, want %#x", got, uint64(answer))
	}
	if f := answers(); f.Wrong != "" || f.Value != "right" {
		t.Errorf("got %+v on this machine", f)
	}
	once := atomic.Bool{}
	wrong := wrongCPUs([]int{0, 1, 2, 3}, 0, func(cpu int) uint64 {
		if cpu == 1 || cpu == 3 && !once.Swap(true) {
			return answer ^ 1<<40
		}
		return answer
	})
	if !slices.Equal(wrong, []int{1, 3}) {
		t.Errorf("CPUs %v are named, want 1 and 3", wrong)
	}
}
