package checkpoint

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func writeText(text string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}
}

// folder returns the names and contents of the files of a folder.
func folder(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[e.Name()] = string(text)
	}
	return out
}

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	for _, text := range []string{"first", "second"} {
		if err := WriteFile(path, writeText(text)); err != nil {
			t.Fatal(err)
		}
		if got := folder(t, dir); len(got) != 1 || got["a"] != text {
			t.Fatalf("got %v, want %q in a alone", got, text)
		}
	}
	cause := errors.New("no more")
	err := WriteFile(path, func(w io.Writer) error {
		if err := writeText(strings.Repeat("x", 1<<20))(w); err != nil {
			return err
		}
		return cause
	})
	if err != cause {
		t.Errorf("got %v, want the function's own error", err)
	}
	if got := folder(t, dir); len(got) != 1 || got["a"] != "second" {
		t.Errorf("a failed write left %v", got)
	}
	if err := WriteFile(filepath.Join(dir, "absent", "a"), writeText("")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no such folder: got %v", err)
	}
}

func TestWriteFileFollowsLinks(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.WriteFile(filepath.Join(elsewhere, "file"), []byte("old"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(elsewhere, "file"), link); err != nil {
		t.Skipf("this system has no links for us: %v", err)
	}
	if err := WriteFile(link, writeText("new")); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("the link was replaced: %v, %v", info, err)
	}
	if got := folder(t, elsewhere); got["file"] != "new" || len(got) != 1 {
		t.Errorf("got %v", got)
	}
}

// TestWriteFileToDevice checks that a device is written to, never replaced by a file, and that a full device is an
// error.
func TestWriteFileToDevice(t *testing.T) {
	for device, full := range map[string]bool{"/dev/null": false, "/dev/full": true} {
		before, err := os.Stat(device)
		if err != nil {
			t.Logf("there is no %s here", device)
			continue
		}
		if err := CheckWritable(device); err != nil {
			t.Errorf("%s: %v", device, err)
		}
		err = WriteFile(device, writeText("text"))
		if full != (err != nil) || full && !strings.Contains(err.Error(), "checkpoint: write /dev/full: ") {
			t.Errorf("%s: got %v", device, err)
		}
		if after, err := os.Stat(device); err != nil || !os.SameFile(before, after) {
			t.Errorf("%s was replaced: %v", device, err)
		}
	}
}

func TestCheckWritable(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("kept"), 0o666); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		filepath.Join(dir, "new"):         "",
		file:                              "",
		dir:                               "is a folder: want the name of a file",
		filepath.Join(dir, "absent", "f"): "absent",
		filepath.Join(file, "f"):          "file",
	} {
		err := CheckWritable(path)
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
	if got := folder(t, dir); len(got) != 1 || got["file"] != "kept" {
		t.Errorf("it left %v", got)
	}
}
