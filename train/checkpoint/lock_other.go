//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package checkpoint

import (
	"errors"
	"os"
)

// tryLock would lock an open file for this process alone.
func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
