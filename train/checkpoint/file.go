package checkpoint

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// WriteFile writes the file path with what write writes, whole or not at all: under another name beside path, which is then
// synced and renamed, and the folder synced. A symbolic link is followed; what is no regular file (a pipe, /dev/stdout) is written to as it is. An
// error of write is returned as it is.
func WriteFile(path string, write func(w io.Writer) error) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return wrap(err)
		}
		return fill(f, write, func() error { return nil })
	}
	f, err := createBeside(path)
	if err != nil {
		return wrap(err)
	}
	if err = fill(f, write, f.Sync); err == nil {
		err = wrap(os.Rename(f.Name(), path))
	}
	if err != nil {
		os.Remove(f.Name())
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// fill writes f, and closes it.
func fill(f *os.File, write func(io.Writer) error, sync func() error) error {
	defer f.Close() // does nothing where the last step has closed it
	w := bufio.NewWriterSize(f, 1<<18)
	if err := write(w); err != nil {
		return err
	}
	for _, step := range []func() error{w.Flush, sync, f.Close} {
		if err := step(); err != nil {
			return wrap(err)
		}
	}
	return nil
}

// wrap adds the package to an error, if it is one.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("checkpoint: %w", err)
}

// CheckWritable returns an error if [WriteFile] could not create path now: there is no such folder, say, or it is read-only.
// It leaves nothing behind. Whoever writes after hours of work asks before them.
func CheckWritable(path string) error {
	switch info, err := os.Stat(path); {
	case err == nil && info.IsDir():
		return fmt.Errorf("checkpoint: %s is a folder: want the name of a file", path)
	case err == nil && !info.Mode().IsRegular():
		return nil
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	f, err := createBeside(path)
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	return wrap(err)
}

// createBeside creates a new file in the folder of path, with the permissions that path itself would get, and locks it, where that can
// be done: so others see that it is being written.
func createBeside(path string) (*os.File, error) {
	removeLeft(path)
	for n := os.Getpid(); ; n++ {
		f, err := os.OpenFile(fmt.Sprintf("%s.%d.tmp", path, n), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if free, err := tryLock(f); err == nil && (!free || !isAt(f, f.Name())) { // somebody took it for left behind
			f.Close()
			continue
		}
		return f, nil
	}
}

// removeLeft removes what writers of path that were killed have left beside it.
func removeLeft(path string) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return // creating a file says why
	}
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), filepath.Base(path)+".")
		if number, tmp := strings.CutSuffix(number, ".tmp"); ok && tmp && number != "" && strings.Trim(number, "0123456789") == "" && e.Type().IsRegular() {
			removeUnlocked(filepath.Join(filepath.Dir(path), e.Name()))
		}
	}
}

// removeUnlocked removes a file that no process has locked.
func removeUnlocked(path string) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer f.Close()
	if free, err := tryLock(f); err == nil && free && isAt(f, path) {
		os.Remove(path)
	}
}
