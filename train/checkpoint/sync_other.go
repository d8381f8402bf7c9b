//go:build !windows

package checkpoint

import "os"

// syncFolder makes sure that the entries of a folder are on the disk.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return wrap(err)
	}
	defer f.Close()
	return wrap(f.Sync())
}
