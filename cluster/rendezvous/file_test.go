package rendezvous_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// logOf returns a folder, its URL as a store, and the name of the store's log.
func logOf(t *testing.T) (folder, url, log string) {
	folder = filepath.Join(t.TempDir(), "store")
	return folder, "file://" + filepath.ToSlash(folder), filepath.Join(folder, "lockstep-store.log")
}

func set(t *testing.T, s rendezvous.Store, key, value string) {
	t.Helper()
	if err := s.Set(t.Context(), key, []byte(value)); err != nil {
		t.Fatal(err)
	}
}

// TestFolderOfAnother: a folder that was removed and is used again is another store, however many changes it has: the
// content is lost, and no user of the first store mistakes it for that.
func TestFolderOfAnother(t *testing.T) {
	folder, url, _ := logOf(t)
	first := open(t, url, rendezvous.Config{})
	defer first.Close()
	set(t, first, "k", "first")
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	second := open(t, url, rendezvous.Config{})
	defer second.Close()
	for i := range 30 { // its log is rewritten, at a revision that the first store never had
		set(t, second, "k", strings.Repeat("second", 20_000)+fmt.Sprint(i))
	}
	if _, _, err := first.Get(t.Context(), "k"); !errors.Is(err, rendezvous.ErrLost) || !strings.Contains(err.Error(),
		"another store") {
		t.Errorf("reading: %v, want ErrLost", err)
	}
	if err := first.Set(t.Context(), "k", nil); !errors.Is(err, rendezvous.ErrLost) {
		t.Errorf("writing: %v, want ErrLost", err)
	}
	if value, _, err := second.Get(t.Context(), "k"); err != nil || !bytes.HasSuffix(value, []byte("29")) {
		t.Errorf("the second store: %d bytes, %v", len(value), err)
	}
}

// TestFolderTruncated checks that a store whose log has lost bytes that were already read returns an error, and does
// not write to the log.
func TestFolderTruncated(t *testing.T) {
	_, url, log := logOf(t)
	s := open(t, url, rendezvous.Config{})
	defer s.Close()
	set(t, s, "a", "1")
	set(t, s, "b", "2")
	info, err := os.Stat(log)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(log, info.Size()-1); err != nil {
		t.Fatal(err)
	}
	if err := s.Set(t.Context(), "c", nil); !errors.Is(err, rendezvous.ErrLost) || !strings.Contains(err.Error(),
		"cut short") {
		t.Errorf("got %v, want ErrLost", err)
	}
	if now, err := os.Stat(log); err != nil || now.Size() != info.Size()-1 {
		t.Errorf("it was written to: %v, %v", now.Size(), err)
	}
}

// TestFolderAfterKilledWriters: whatever part of an entry or of a new log a killed writer has left, the next writers
// continue after the last whole entry.
func TestFolderAfterKilledWriters(t *testing.T) {
	folder, url, log := logOf(t)
	s := open(t, url, rendezvous.Config{})
	defer s.Close()
	set(t, s, "whole", "1")
	whole, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	set(t, s, "torn", "2")
	all, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	for at := len(whole); at < len(all); at++ {
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(log, all[:at], 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(log+".new", all[:at/2], 0o600); err != nil {
			t.Fatal(err)
		}
		u := open(t, url, rendezvous.Config{})
		if _, err := os.Stat(log + ".new"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the new log is left: %v", err)
		}
		set(t, u, "next", "3")
		entries, revision, err := u.List(t.Context(), "")
		if err != nil || len(entries) != 2 || entries[0].Key != "next" || entries[1].Key != "whole" || revision != 2 {
			t.Errorf("cut at %d of %d: %+v at %d, %v", at, len(all), entries, revision, err)
		}
		u.Close()
	}
}

// TestFolderLarge: a log longer than one read is read to its end.
func TestFolderLarge(t *testing.T) {
	_, url, _ := logOf(t)
	s := open(t, url, rendezvous.Config{})
	defer s.Close()
	value := make([]byte, 3<<20)
	for i := range 6 {
		value[0] = byte(i)
		if err := s.Set(t.Context(), fmt.Sprint(i), value); err != nil {
			t.Fatal(err)
		}
	}
	u := open(t, url, rendezvous.Config{})
	defer u.Close()
	entries, _, err := u.List(t.Context(), "")
	if err != nil || len(entries) != 6 {
		t.Fatalf("%d entries, %v", len(entries), err)
	}
	for i, e := range entries {
		if len(e.Value) != len(value) || e.Value[0] != byte(i) {
			t.Errorf("%s holds %d bytes, the first is %d", e.Key, len(e.Value), e.Value[0])
		}
	}
}
