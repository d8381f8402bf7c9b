//go:build !(linux && amd64)

package engines

import (
	"fmt"
	"runtime"

	"github.com/gomlx/go-xla/installer"
)

func downloadAccelerator(kind, _, _ string, _ installer.VerbosityLevel) error {
	return fmt.Errorf("plugin %s is not available for %s/%s: want linux/amd64", kind, runtime.GOOS, runtime.GOARCH)
}
