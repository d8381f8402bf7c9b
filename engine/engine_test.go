package engine_test

import (
	"fmt"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
)

func TestRole(t *testing.T) {
	got := fmt.Sprint([]engine.Role{engine.Parameter, engine.Slot, engine.Average, engine.Frozen, 9})
	if want := "[parameter optimizer's slot average frozen Role(9)]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
