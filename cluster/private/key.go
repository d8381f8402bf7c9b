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
	"time"
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
	if err := link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		if e := renameKey(f.Name(), path); e != nil {
			return fmt.Errorf("%w (and without a hard link: %w)", err, e)
		}
	}
	return nil
}

var link = os.Link // or a test's

// lockWait bounds the wait for another process that renames its key at this moment.
var lockWait = 10 * time.Second

// renameKey is for file systems without hard links. A rename replaces a key that is there already, so only the process
// that has created the lock file may do it.
func renameKey(from, path string) error {
	lock := path + ".lock"
	for since := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		f, err := os.OpenFile(lock, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err == nil {
			defer os.Remove(lock)
			if err := f.Close(); err != nil {
				return err
			}
			if _, err = os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				err = os.Rename(from, path)
			}
			return err
		}
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		if _, err := os.Lstat(path); err == nil {
			return nil
		}
		if time.Since(since) > lockWait {
			return fmt.Errorf("the file %s has been there for %v, but no key: a process that was making the key has ended; "+
				"remove that file", lock, lockWait)
		}
	}
}

// readKey reads the key.
func readKey(path string) (string, error) {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return "", err
	case !info.Mode().IsRegular() || ownerOf(info) != os.Geteuid() || runtime.GOOS != "windows" &&
		info.Mode().Perm()&0o077 != 0:
		return "", fmt.Errorf("%s is %v of user %d: want a file of this user that no other user may read", path,
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
