package checkpoint

import (
	"errors"
	"syscall"

	"golang.org/x/sys/windows"
)

// noSpace reports whether err means that the disk or the user's quota is full.
func noSpace(err error) bool {
	for _, full := range []error{
		windows.ERROR_DISK_FULL, windows.ERROR_HANDLE_DISK_FULL,
		windows.ERROR_DISK_QUOTA_EXCEEDED, syscall.ENOSPC,
	} {
		if errors.Is(err, full) {
			return true
		}
	}
	return false
}
