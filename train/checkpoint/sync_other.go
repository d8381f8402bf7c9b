//go:build !windows

package checkpoint

import (
	"errors"
	"os"
	"syscall"
)

// syncFolder syncs the entries of a folder to disk. It ignores the error of network file systems that do not
// support this.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return wrap(err)
	}
	defer f.Close()
	if err := f.Sync(); !errors.Is(err, syscall.EINVAL) && !errors.Is(err, errors.ErrUnsupported) {
		return wrap(err)
	}
	return nil
}
