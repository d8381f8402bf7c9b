//go:build unix

package checkpoint

import (
	"errors"
	"syscall"
)

// noSpace reports whether an error says that a disk is full, or its user's part of it.
func noSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}
