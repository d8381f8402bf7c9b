//go:build !unix

package private

import (
	"fmt"
	"io/fs"
	"os"
)

// check returns an error unless folder is a folder. Access lists control who may modify it: the folder for
// temporary files is the user's own.
func check(folder string) error {
	info, err := os.Lstat(folder)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a folder", folder)
	}
	return err
}

func checkPlace(string) error { return nil }

func idOf(folder string, _ fs.FileInfo) string { return folder }

func ownerOf(fs.FileInfo) int { return os.Geteuid() }
