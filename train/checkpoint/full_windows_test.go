package checkpoint

import (
	"fmt"
	"io/fs"
	"syscall"
	"testing"

	"golang.org/x/sys/windows"
)

// TestNoSpace checks that exactly the errors of a full disk on Windows are recognised as such.
func TestNoSpace(t *testing.T) {
	for err, want := range map[error]bool{
		windows.ERROR_DISK_FULL: true, windows.ERROR_HANDLE_DISK_FULL: true, windows.ERROR_DISK_QUOTA_EXCEEDED: true,
		syscall.ENOSPC:              true,
		windows.ERROR_ACCESS_DENIED: false, windows.ERROR_SHARING_VIOLATION: false,
	} {
		if got := noSpace(fmt.Errorf("writing: %w", &fs.PathError{Op: "write", Path: "weights", Err: err})); got != want {
			t.Errorf("%v: got %v", err, got)
		}
	}
}
