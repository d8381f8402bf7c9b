//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package checkpoint

import (
	"errors"
	"os"
)

// tryLock always fails: file locks are not supported on this system.
func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
