//go:build unix

package checkpoint

import (
	"errors"
	"syscall"
)

// noSpace reports whether err means that the disk or the user's quota is full.
func noSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}
