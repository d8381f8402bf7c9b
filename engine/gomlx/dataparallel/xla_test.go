//go:build xla && cgo

package dataparallel_test

import (
	"os"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/go-xla/compute/xla"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// TestEqualBitsOnXLA has backends that share no memory with the host.
func TestEqualBitsOnXLA(t *testing.T) {
	plugin := os.Getenv("LOCKSTEP_XLA_PLUGIN")
	if plugin == "" {
		t.Skip("LOCKSTEP_XLA_PLUGIN names no PJRT plugin")
	}
	xla.EnableAutoInstall(false)
	open := func(t *testing.T) compute.Backend {
		t.Helper()
		b, err := xla.New(plugin + ",noshared_buffers")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.Finalize)
		return b
	}
	equalBits(t, open, false, optimizer.StochasticGradientDescent(), 2)
}
