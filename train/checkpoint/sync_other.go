//go:build !windows

package checkpoint

import (
	"errors"
	"os"
	"syscall"
)

// syncFolder makes sure that the entries of a folder are on the disk. Some network file systems have no way to, and say so.
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
