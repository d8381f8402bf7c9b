package private

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
)

// keyName is the name of the key's file in the folder.
const keyName = "key"

// Key returns a key that all of this user's processes on this host share and no other user has: more than 256
// random bits, in a file in [Folder] that the first process creates.
func Key() (string, error) {
	folder, err := Folder()
	if err != nil {
		return "", err
	}
	path := filepath.Join(folder, keyName)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		if err := makeKey(folder, path); err != nil {
			return "", fmt.Errorf("making this user's key: %w", err)
		}
	}
	text, err := readKey(path)
	if err != nil {
		return "", fmt.Errorf("this user's key: %w; remove that file when no job runs: the next job makes another", err)
	}
	return text, nil
}

// keyBytes is the length of the text of a key: two of rand.Text's.
const keyBytes = 52

// makeKey creates the key atomically. If another process does so at the same time, one of the two is kept.
func makeKey(folder, path string) error {
	f, err := os.CreateTemp(folder, keyName+"-*") // of mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(rand.Text() + rand.Text())
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// readKey reads the key.
func readKey(path string) (string, error) {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return "", err
	case !info.Mode().IsRegular() || ownerOf(info) != os.Geteuid() || runtime.GOOS != "windows" &&
		info.Mode().Perm()&0o077 != 0:
		return "", fmt.Errorf("%s is %v of user %d: want a file of this user's own that nobody else may read", path,
			info.Mode(), ownerOf(info))
	}
	f, err := os.Open(path) // no other user can have replaced it: the folder was checked
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, keyBytes+1))
	if err == nil && len(text) != keyBytes {
		err = fmt.Errorf("%s has %d bytes, want %d", path, info.Size(), keyBytes)
	}
	return string(text), err
}
