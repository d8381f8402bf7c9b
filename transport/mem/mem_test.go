package mem_test

import (
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemory(t *testing.T) {
	transporttest.Run(t, transporttest.Transport{Open: open(mem.New), Domain: transporttest.OneDomain})
}

func TestPipes(t *testing.T) {
	transporttest.Run(t, transporttest.Transport{Open: open(mem.NewPipes)})
}

// TestVirtual: a bubble of testing/synctest sees all waits.
func TestVirtual(t *testing.T) {
	transporttest.Run(t, transporttest.Transport{Open: open(mem.New), Domain: transporttest.OneDomain, Virtual: true})
}

func open(ends func(n int) []transport.Endpoint) func(*testing.T, int) []transport.Endpoint {
	return func(_ *testing.T, n int) []transport.Endpoint { return ends(n) }
}

func TestNewPanics(t *testing.T) {
	defer func() {
		if got := fmt.Sprint(recover()); got != "mem: a group of 0 ranks" {
			t.Errorf("New(0) panicked with %q", got)
		}
	}()
	mem.New(0)
}
