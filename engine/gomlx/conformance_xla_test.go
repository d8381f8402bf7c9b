//go:build xla && cgo

package gomlx_test

import (
	"os"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

func TestConformanceXLA(t *testing.T) {
	needXLA(t)
	enginetest.Run(t, conformance(func(n int) (engine.Engine, error) { return gomlx.OpenXLA(gomlx.XLAOptions{Devices: n}) }))
}

// TestConformanceStaged runs the suite with the copies that an accelerator needs.
func TestConformanceStaged(t *testing.T) {
	needXLA(t)
	enginetest.Run(t, conformance(func(n int) (engine.Engine, error) { return gomlx.OpenXLA(gomlx.Staged(gomlx.XLAOptions{Devices: n})) }))
}

func needXLA(t *testing.T) {
	t.Helper()
	if os.Getenv(gomlx.PluginEnv) == "" {
		t.Skipf("no XLA: $%s is not set", gomlx.PluginEnv)
	}
}
