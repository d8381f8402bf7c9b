//go:build xla && cgo

package gomlx_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

func TestConformanceXLA(t *testing.T) {
	needXLA(t)
	enginetest.Run(t, conformance(func(n int) (engine.Engine, error) {
		return gomlx.OpenXLA(gomlx.XLAOptions{Devices: n})
	}))
}

// TestConformanceStaged runs the suite's tests of memory with the copies that an accelerator needs. Most of its time
// are XLA's compilations, so it leaves out the other tests, which TestConformanceXLA runs on the same programs.
func TestConformanceStaged(t *testing.T) {
	needXLA(t)
	c := conformance(func(n int) (engine.Engine, error) {
		return gomlx.OpenXLA(gomlx.Staged(gomlx.XLAOptions{Devices: n}))
	})
	c.Memory = true
	enginetest.Run(t, c)
}

const builtWithXLA = true

func TestOpenXLAErrors(t *testing.T) {
	t.Setenv(gomlx.PluginEnv, "")
	for _, test := range []struct{ name, plugin, want string }{
		{"not set", "", gomlx.PluginEnv},
		{"relative", "plugin.so", "absolute"},
		{"missing", filepath.Join(t.TempDir(), "plugin.so"), "no such file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, err := gomlx.OpenXLA(gomlx.XLAOptions{Plugin: test.plugin})
			if err == nil {
				e.Close()
				t.Fatal("opened")
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %q does not mention %q", err, test.want)
			}
		})
	}
}

func needXLA(t *testing.T) {
	t.Helper()
	if os.Getenv(gomlx.PluginEnv) == "" {
		t.Skipf("no XLA: $%s is not set", gomlx.PluginEnv)
	}
}
