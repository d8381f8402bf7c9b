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

// WriteFile atomically writes the file path with the data that write produces. It writes a temporary file in
// the same folder, syncs and renames it, and syncs the folder. It follows a symbolic link, and writes
// directly to what is not a regular file (a pipe, /dev/stdout). It returns an error of write unchanged.
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

// fill writes, syncs and closes f.
func fill(f *os.File, write func(io.Writer) error, sync func() error) error {
	defer f.Close() // no effect if f is already closed
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

// wrap adds the package's prefix to a non-nil error.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("checkpoint: %w", err)
}

// CheckWritable returns an error if [WriteFile] could not create path now, for example because the folder
// does not exist or is read-only. It leaves no file behind. Call it before hours of work whose result goes to
// path.
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

// createBeside creates a new file in the folder of path, with the permissions that path would get. It locks
// the file, where the system can, to show other processes that it is in use.
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
		if free, err := tryLock(f); err == nil && (!free || !isAt(f, f.Name())) { // another process removed it
			f.Close()
			continue
		}
		return f, nil
	}
}

// removeLeft removes the temporary files of killed writers of path.
func removeLeft(path string) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return // creating a file reports the error
	}
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), filepath.Base(path)+".")
		if number, tmp := strings.CutSuffix(number, ".tmp"); ok && tmp && number != "" &&
			strings.Trim(number, "0123456789") == "" && e.Type().IsRegular() {
			removeUnlocked(filepath.Join(filepath.Dir(path), e.Name()))
		}
	}
}

// removeUnlocked removes a file if no process has locked it.
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
