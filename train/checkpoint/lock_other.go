//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package checkpoint

import (
	"errors"
	"os"
	"syscall"
)

// tryLock would lock an open file for this process alone.
func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }

// noSpace reports whether an error says that a disk is full.
func noSpace(err error) bool { return errors.Is(err, syscall.ENOSPC) }
