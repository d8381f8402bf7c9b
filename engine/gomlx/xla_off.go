//go:build !(xla && cgo)

package gomlx

import (
	"errors"

	"github.com/lockstep-ml/lockstep/engine"
)

const builtWithXLA = false

// OpenXLA opens XLA through a PJRT plugin. XLA needs cgo and the build tag xla. This build lacks them, so
// OpenXLA always returns an error.
func OpenXLA(XLAOptions) (engine.Engine, error) {
	return nil, errors.New("gomlx: this program was built without XLA: build it with CGO_ENABLED=1 and " +
		"-tags xla, and install a PJRT plugin (lockstep engine install) or set $" + PluginEnv +
		" to the absolute path of one")
}
