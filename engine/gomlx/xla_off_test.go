//go:build !(xla && cgo)

package gomlx_test

import (
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

const builtWithXLA = false

func TestOpenXLAWithoutIt(t *testing.T) {
	e, err := gomlx.OpenXLA(gomlx.XLAOptions{Plugin: "/some/plugin.so"})
	if err == nil {
		e.Close()
		t.Fatal("opened XLA in a build without it")
	}
	for _, word := range []string{"-tags xla", "CGO_ENABLED=1", gomlx.PluginEnv} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not mention %s", err, word)
		}
	}
}
