package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/tensor"
)

// childEnv makes a process of this test binary run childMain instead of the tests.
const childEnv = "LOCKSTEP_TEST_CHECKPOINT_CHILD"

func TestMain(m *testing.M) {
	if text := os.Getenv(childEnv); text != "" {
		childMain(text)
		return
	}
	goleak.VerifyTestMain(m)
}

// contents returns the content of a snapshot of a step: other bits for every step.
func contents(step int64) *Contents {
	g := rand.New(rand.NewPCG(uint64(step), 1))
	w := make([]float32, 40)
	for i := range w {
		w[i] = g.Float32()
	}
	return &Contents{
		Step: step, State: json.RawMessage(fmt.Sprintf(`{"epoch":%d}`, step/10)),
		Tensors: []Tensor{{"average", tensor.Of([]float64{float64(step), 1}, 2, 1)}, {"weights", tensor.Of(w, 8, 5)}},
	}
}

// same reports whether a snapshot has the contents of its step.
func same(s *Snapshot) error {
	want := contents(s.Step)
	var state, wanted map[string]int
	if err := errors.Join(json.Unmarshal(s.State, &state), json.Unmarshal(want.State, &wanted)); err != nil ||
		!maps.Equal(state, wanted) {
		return fmt.Errorf("state %s, want %s (%v)", s.State, want.State, err)
	}
	if !slices.EqualFunc(s.Tensors, want.Tensors,
		func(a, b Tensor) bool { return a.Name == b.Name && a.Value.Equal(b.Value) }) {
		return fmt.Errorf("tensors %v, want %v", s.Tensors, want.Tensors)
	}
	return nil
}

// open opens a manager, or fails the test.
func open(t testing.TB, cfg Config) *Manager {
	t.Helper()
	m, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// save saves the contents of steps.
func save(t testing.TB, m *Manager, steps ...int64) {
	t.Helper()
	for _, step := range steps {
		if err := m.Save(contents(step)); err != nil {
			t.Fatal(err)
		}
	}
}

// latest returns the newest readable snapshot, and checks its content.
func latest(t testing.TB, dir string) (*Snapshot, []error) {
	t.Helper()
	s, refused, err := Latest(dir)
	if err != nil {
		t.Fatal(err)
	}
	if s != nil {
		if err := same(s); err != nil {
			t.Errorf("%s: %v", s.Path, err)
		}
	}
	return s, refused
}

// bases returns the names in a folder, except its lock, which exists while a manager is open.
func bases(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != lockName {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestSnapshotsAreKept(t *testing.T) {
	for keep, want := range map[int][]string{
		0: {"snapshot-000003-step-2", "snapshot-000004-step-5", "snapshot-000005-step-5"},
		1: {"snapshot-000005-step-5"},
		-1: {
			"snapshot-000001-step-0", "snapshot-000002-step-7", "snapshot-000003-step-2", "snapshot-000004-step-5",
			"snapshot-000005-step-5",
		},
	} {
		dir := filepath.Join(t.TempDir(), "new")
		m := open(t, Config{Dir: dir, Keep: keep})
		if s, refused := latest(t, dir); s != nil || refused != nil {
			t.Errorf("an empty folder: %v, %v", s, refused)
		}
		save(t, m, 0, 7, 2)
		save(t, open(t, Config{Dir: dir, Keep: keep}), 5, 5) // another process, later
		if got := bases(t, dir); !slices.Equal(got, want) {
			t.Errorf("keep %d: got %v, want %v", keep, got, want)
		}
		if s, refused := latest(t, dir); s.Step != 5 || refused != nil || filepath.Base(s.Path) != "snapshot-000005-step-5" ||
			s.Written.IsZero() {
			t.Errorf("latest: %v, %v", s, refused)
		}
		paths, err := List(dir)
		if err != nil || len(paths) != len(want) || filepath.Base(paths[0]) != want[0] {
			t.Errorf("list: %v, %v", paths, err)
		}
		if s, _, err := Find(paths[0]); err != nil || same(s) != nil {
			t.Errorf("find: %v, %v", s, err)
		}
		if s, _, err := Find(dir); err != nil || s.Step != 5 {
			t.Errorf("find: %v, %v", s, err)
		}
	}
}

// TestRemovedMeanwhile checks that it is not an error if another process removes an old snapshot at the same moment.
func TestRemovedMeanwhile(t *testing.T) {
	dir := t.TempDir()
	m := open(t, Config{Dir: dir, Keep: 1, watch: func(op, path string) error {
		if op == "unname" {
			return os.RemoveAll(path)
		}
		return nil
	}})
	save(t, m, 1, 2, 3)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if got, want := bases(t, dir), []string{"snapshot-000003-step-3"}; !slices.Equal(got, want) {
		t.Errorf("left are %v, want %v", got, want)
	}
}

// TestStart checks that saves run in the background, one at a time, and that the error of one is that of all later
// calls.
func TestStart(t *testing.T) {
	dir := t.TempDir()
	goOn := make(chan struct{})
	m := open(t, Config{Dir: dir, watch: func(op, _ string) error {
		if op == "mkdir" {
			<-goOn
		}
		return nil
	}})
	if err := m.Start(contents(1)); err != nil || m.Err() != nil {
		t.Fatal(err, m.Err())
	}
	if s, _ := latest(t, dir); s != nil {
		t.Errorf("%s is there too early", s.Path)
	}
	close(goOn)
	if err := m.Wait(); err != nil || m.Dir() != dir {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := m.Start(contents(2)); err != nil {
		t.Error(err)
	}
	for range 2 {
		err := m.Wait()
		if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(),
			"snapshot-000002-step-2 could not be written (no earlier snapshot exists)") {
			t.Errorf("wait: got %v", err)
		}
		if m.Err() != err || m.Start(contents(3)) != err {
			t.Errorf("later: %v, %v", m.Err(), m.Start(contents(3)))
		}
	}
}

// TestNoFolder checks the error of a configuration without a folder.
func TestNoFolder(t *testing.T) {
	if m, err := Open(Config{}); err == nil || !strings.Contains(err.Error(), "Config.Dir is empty") {
		t.Errorf("got %v, %v", m, err)
	}
}

// TestDamage checks that a snapshot with any byte changed, or with any file truncated, longer, missing or from another
// snapshot, is refused by name, and that the one before is read instead.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	save(t, open(t, Config{Dir: dir}), 10, 20)
	good, bad := filepath.Join(dir, "snapshot-000001-step-10"), filepath.Join(dir, "snapshot-000002-step-20")
	refused := func(what, file string) {
		t.Helper()
		_, err := ReadSnapshot(bad)
		if err == nil || !strings.Contains(err.Error(), bad) ||
			!strings.Contains(err.Error(), file) && !strings.Contains(err.Error(), sumsFile) {
			t.Fatalf("%s: %s: got %v", file, what, err)
		}
	}
	for _, file := range []string{tensorsFile, manifestFile, sumsFile} {
		path := filepath.Join(bad, file)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		write := func(text []byte) {
			t.Helper()
			if err := os.WriteFile(path, text, 0o666); err != nil {
				t.Fatal(err)
			}
		}
		for i := range text {
			changed := slices.Clone(text)
			changed[i] ^= 1 << (i % 8)
			write(changed)
			refused(fmt.Sprintf("byte %d changed", i), file)
			write(text[:i])
			refused(fmt.Sprintf("cut to %d bytes", i), file)
		}
		write(append(slices.Clone(text), '\n'))
		refused("longer", file)
		other, err := os.ReadFile(filepath.Join(good, file))
		if err != nil {
			t.Fatal(err)
		}
		write(other)
		refused("of another", file)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		refused("missing", file)
		if err := os.Mkdir(path, 0o777); err != nil {
			t.Fatal(err)
		}
		refused("a folder", file)
		s, why := latest(t, dir)
		if s == nil || s.Path != good || len(why) != 1 || !strings.Contains(why[0].Error(), bad) {
			t.Fatalf("latest: %v, %v", s, why)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		write(text)
		if s, _ := latest(t, dir); s.Path != bad {
			t.Fatalf("repaired, and %s is the latest", s.Path)
		}
	}
	if err := os.RemoveAll(good); err != nil {
		t.Fatal(err)
	}
	renamed := filepath.Join(dir, "snapshot-000001-step-10")
	if err := os.Rename(bad, renamed); err != nil {
		t.Fatal(err)
	}
	if s, _, err := Latest(dir); s != nil || err == nil ||
		!strings.Contains(err.Error(), "no snapshot in "+dir+" can be read") ||
		!strings.Contains(err.Error(), "manifest.json is of step 20") {
		t.Errorf("with none that can be read: %v, %v", s, err)
	}
}

// TestForeign checks that files that are not snapshots are not changed, and that those with the name of a snapshot are
// refused by name.
func TestForeign(t *testing.T) {
	dir := t.TempDir()
	m := open(t, Config{Dir: dir, Keep: 1})
	save(t, m, 1)
	mine := filepath.Join(dir, "snapshot-000001-step-1")
	for name, text := range map[string]string{
		"model.ckpt": "x", "snapshot-000009-step-3": "a file", "snapshot-7": "x",
		"notes/snapshot-000009-step-9/manifest.json": "{}",
	} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte(text), 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	s, refused := latest(t, dir)
	if s == nil || s.Path != mine || len(refused) != 2 {
		t.Fatalf("latest: %v, %v", s, refused)
	}
	for i, want := range []string{
		"snapshot-7 is refused: its name is not snapshot-NUMBER-step-STEP",
		"snapshot-000009-step-3 is refused: it is not a folder",
	} {
		if !strings.Contains(refused[i].Error(), want) {
			t.Errorf("got %v, want %q", refused[i], want)
		}
	}
	for path, want := range map[string]string{
		filepath.Join(dir, "model.ckpt"):                   "model.ckpt is not a folder: want a snapshot",
		filepath.Join(dir, "absent"):                       "absent",
		filepath.Join(dir, "notes"):                        "notes/snapshot-000009-step-9 is refused",
		filepath.Join(dir, "notes/snapshot-000009-step-9"): "SHA256SUMS",
		t.TempDir(): "contains no snapshot",
		filepath.Join(dir, "snapshot-000009-step-3"): "it is not a folder",
		filepath.Join(dir, "snapshot-000123-step-3"): "snapshot-000123-step-3",
	} {
		if _, _, err := Find(path); err == nil || !strings.Contains(err.Error(), filepath.FromSlash(want)) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
	newer := strings.Replace(string(mustRead(t, filepath.Join(mine, manifestFile))), `"version": 1`,
		`"version": 3, "more": 1`, 1)
	rewrite(t, mine, newer)
	if _, err := ReadSnapshot(mine); err == nil ||
		!strings.Contains(err.Error(), "is of version 3; this program reads version 2") {
		t.Errorf("newer: got %v", err)
	}
	rewrite(t, mine, strings.Replace(newer, formatName, "something", 1))
	if _, err := ReadSnapshot(mine); err == nil || !strings.Contains(err.Error(), `unknown field "more"`) {
		t.Errorf("foreign: got %v", err)
	}
	if _, err := Open(Config{Dir: filepath.Join(dir, "a", "b")}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a parent: got %v", err)
	}
	if _, err := Open(Config{Dir: filepath.Join(dir, "model.ckpt")}); err == nil {
		t.Error("a file was taken for a folder")
	}
}

func mustRead(t testing.TB, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// rewrite replaces the manifest of a snapshot, with matching checksums.
func rewrite(t testing.TB, path, manifest string) {
	t.Helper()
	if err := errors.Join(os.Remove(filepath.Join(path, manifestFile)),
		os.Remove(filepath.Join(path, sumsFile))); err != nil {
		t.Fatal(err)
	}
	said, _, err := disk{}.writeSummed(filepath.Join(path, manifestFile), writeAll([]byte(manifest)))
	if err != nil {
		t.Fatal(err)
	}
	tensors, _, err := disk{}.writeSummed(filepath.Join(t.TempDir(), "copy"),
		writeAll(mustRead(t, filepath.Join(path, tensorsFile))))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := (disk{}).writeSummed(filepath.Join(path, sumsFile), writeAll(sums(said, tensors))); err != nil {
		t.Fatal(err)
	}
}

// TestOrderOfSteps checks that all files are synced before the snapshot gets its name, and that this is synced before
// an older snapshot is removed.
func TestOrderOfSteps(t *testing.T) {
	dir := t.TempDir()
	var got []string
	m := open(t, Config{Dir: dir, Keep: 1, watch: func(op, path string) error {
		rel, err := filepath.Rel(dir, path)
		if op != "write" {
			got = append(got, op+" "+filepath.ToSlash(rel))
		}
		return err
	}})
	save(t, m, 1, 2)
	one := func(n string) []string {
		var out []string
		out = append(out, "mkdir ."+n)
		for _, file := range []string{tensorsFile, manifestFile, sumsFile} {
			out = append(out, "create ."+n+"/"+file, "sync ."+n+"/"+file)
		}
		return append(out, "sync ."+n, "rename "+n, "sync .")
	}
	first, second := "snapshot-000001-step-1", "snapshot-000002-step-2"
	want := slices.Concat(one(first), one(second), []string{"unname " + first, "remove " + first})
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// FuzzReadSnapshot: whatever a manifest contains, with matching checksums, reading ends with a snapshot or an
// error.
func FuzzReadSnapshot(f *testing.F) {
	dir := f.TempDir()
	save(f, open(f, Config{Dir: dir}), 3)
	path := filepath.Join(dir, "snapshot-000001-step-3")
	f.Add(string(mustRead(f, filepath.Join(path, manifestFile))), mustRead(f, filepath.Join(path, sumsFile)))
	f.Add("null", []byte("x"))
	f.Fuzz(func(t *testing.T, manifest string, said []byte) {
		rewrite(t, path, manifest)
		if s, err := ReadSnapshot(path); (s == nil) == (err == nil) {
			t.Errorf("%v, %v", s, err)
		}
		if m, tensors, err := parseSums(said); err == nil && string(sums(m, tensors)) != string(said) {
			t.Errorf("checksums %q were taken", said)
		}
	})
}
