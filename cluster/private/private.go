// Package private locates a folder that belongs to this user on a host, and that no other user can modify.
// The folder holds the stores of jobs whose launcher configures no store, and the key by which the workers of
// one host authenticate each other without a secret.
//
// The folder is "lockstep-UID" in the folder for temporary files. Any other user can create it there first. A
// folder that does not belong to this user, is a symbolic link, or that others may modify is not used; then
// it is "lockstep" in XDG_RUNTIME_DIR.
package private

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// candidates returns the possible folders, the preferred one first.
func candidates() []string {
	out := []string{filepath.Join(os.TempDir(), "lockstep-"+strconv.Itoa(os.Getuid()))}
	if runtime := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(runtime) {
		out = append(out, filepath.Join(runtime, "lockstep"))
	}
	return out
}

// Path returns the path of [Folder], without creating it. All processes of a user on a host with the same
// TMPDIR and XDG_RUNTIME_DIR get the same path. If no folder exists, it is the path where it would be
// created.
func Path() string {
	all := candidates()
	for _, folder := range all {
		err := check(folder)
		if errors.Is(err, os.ErrNotExist) {
			err = checkPlace(folder)
		}
		if err == nil {
			return folder
		}
	}
	return all[0]
}

// Folder returns this user's folder, and creates it if necessary. The error lists the problem of each
// candidate.
func Folder() (string, error) {
	var errs []error
	for _, folder := range candidates() {
		err := Make(folder)
		if err == nil {
			return folder, nil
		}
		errs = append(errs, err)
	}
	return "", fmt.Errorf("%w: remove what is there, or set TMPDIR or XDG_RUNTIME_DIR, the same for all workers of "+
		"this host, to a folder that no other user may change",
		errors.Join(errs...))
}

// Make creates a folder that only this user can enter, unless it exists, and checks it with check.
func Make(folder string) error {
	if err := os.MkdirAll(folder, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("making the folder %s: %w", folder, err)
	}
	return check(folder)
}

// ID returns a text that is equal in two processes of one host if a folder is the same for both: containers may have
// other folders of the same name.
func ID(folder string) (string, error) {
	info, err := os.Stat(folder)
	if err != nil {
		return "", err
	}
	return idOf(folder, info), nil
}
