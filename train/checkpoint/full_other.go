//go:build !unix && !windows

package checkpoint

import (
	"errors"
	"syscall"
)

// noSpace reports whether an error says that a disk is full.
func noSpace(err error) bool { return errors.Is(err, syscall.ENOSPC) }
