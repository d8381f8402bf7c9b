// Package private finds the folder that this user's processes share on a host, and that nobody else may change: for the
// stores of jobs whose launcher says nothing of where workers meet, and for the key by which the workers of one host
// know each other without a secret.
//
// The folder is "lockstep-UID" in the folder for temporary files. There any other user can make it first; one that is
// not this user's own, is a symbolic link, or that others may change is not used, but "lockstep" in XDG_RUNTIME_DIR in
// its place.
package private

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// candidates returns the folders that may do, the one to prefer first.
func candidates() []string {
	out := []string{filepath.Join(os.TempDir(), "lockstep-"+strconv.Itoa(os.Getuid()))}
	if runtime := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(runtime) {
		out = append(out, filepath.Join(runtime, "lockstep"))
	}
	return out
}

// Path returns where [Folder] is, and makes nothing. All processes of a user on a host that have the same TMPDIR and
// XDG_RUNTIME_DIR get the same. If there is no such folder, it is where there should be one.
func Path() string {
	all := candidates()
	for _, folder := range all {
		err := Check(folder)
		if errors.Is(err, os.ErrNotExist) {
			err = checkPlace(folder)
		}
		if err == nil {
			return folder
		}
	}
	return all[0]
}

// Folder returns this user's own folder, and makes it if it is not there. The error says what is wrong with each that
// could be it.
func Folder() (string, error) {
	var errs []error
	for _, folder := range candidates() {
		err := Make(folder)
		if err == nil {
			return folder, nil
		}
		errs = append(errs, err)
	}
	return "", fmt.Errorf("%w: remove what is there, or set TMPDIR or XDG_RUNTIME_DIR, the same for all workers of this host, to a folder that nobody else may change",
		errors.Join(errs...))
}

// Make makes a folder that only this user can enter, unless it is there, and checks it as [Check] does.
func Make(folder string) error {
	if err := os.MkdirAll(folder, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("making the folder %s: %w", folder, err)
	}
	return Check(folder)
}
