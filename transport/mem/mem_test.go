package mem_test

import (
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemory(t *testing.T) {
	transporttest.Run(t, func(_ *testing.T, n int) []transport.Endpoint { return mem.New(n) })
}

func TestPipes(t *testing.T) {
	transporttest.Run(t, func(_ *testing.T, n int) []transport.Endpoint { return mem.NewPipes(n) })
}

func TestNewPanics(t *testing.T) {
	defer func() {
		if got := fmt.Sprint(recover()); got != "mem: a group of 0 ranks" {
			t.Errorf("New(0) panicked with %q", got)
		}
	}()
	mem.New(0)
}
