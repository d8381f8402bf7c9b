//go:build !unix && !windows

package checkpoint

import (
	"errors"
	"syscall"
)

// noSpace reports whether err means that the disk is full.
func noSpace(err error) bool { return errors.Is(err, syscall.ENOSPC) }
