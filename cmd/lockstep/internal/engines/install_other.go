//go:build !(linux && amd64)

package engines

import (
	"fmt"
	"runtime"

	"github.com/gomlx/go-xla/installer"
)

func downloadAccelerator(kind, _, _ string, _ installer.VerbosityLevel) error {
	return fmt.Errorf("there is no plugin %s for %s/%s: they exist for linux/amd64", kind, runtime.GOOS, runtime.GOARCH)
}
