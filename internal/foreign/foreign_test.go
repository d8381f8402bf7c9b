package foreign

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestFind loads libraries that the test builds, with the functions of the real ones.
func TestFind(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("builds its libraries with the C compiler of Linux")
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("there is no C compiler to make a library with")
	}
	dir := t.TempDir()
	build := func(name, source string) string {
		t.Helper()
		c, so := filepath.Join(dir, name+".c"), filepath.Join(dir, name+".so")
		if err := os.WriteFile(c, []byte(source), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(cc, "-shared", "-fPIC", "-o", so, c).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return so
	}
	const mpi = `#include <string.h>
int MPI_Get_library_version(char *v, int *n) { strcpy(v, "Test MPI 9.8, made here\nsecond line"); *n = 30; return 0; }`
	for _, test := range []struct{ name, variable, source, version, text string }{
		{"mpi", "LOCKSTEP_MPI", mpi, "Test MPI 9.8, made here", ""},
		{
			"mpi", "LOCKSTEP_MPI", `int MPI_Get_library_version(char *v, int *n) { return 3; }`, "",
			"MPI_Get_library_version returned 3",
		},
		{"mpi", "LOCKSTEP_MPI", `int other;`, "", "MPI_Get_library_version"},
		{"nccl", "LOCKSTEP_NCCL", `int ncclGetVersion(int *v) { *v = 22005; return 0; }`, "2.20.5", ""},
		{"nccl", "LOCKSTEP_NCCL", `int ncclGetVersion(int *v) { return 2; }`, "", "ncclGetVersion returned 2"},
		{"nccl", "LOCKSTEP_NCCL", `int ncclGetVersion(int *v) { return 0; }`, "", "returned no version"},
	} {
		so := build(test.name+strings.Map(letters, test.version+test.text), test.source)
		t.Setenv(test.variable, so)
		l, err := Find(test.name)
		if test.text != "" {
			if err == nil || !strings.Contains(err.Error(), test.text) {
				t.Errorf("%s: %v, want %q", test.source, err, test.text)
			}
			continue
		}
		if err != nil || l.Version != test.version || l.Path != so {
			t.Errorf("%s: %+v, %v; want version %s", test.source, l, err, test.version)
		}
	}
	t.Setenv("LOCKSTEP_NCCL", filepath.Join(dir, "missing.so"))
	if _, err := Find("nccl"); err == nil || !strings.Contains(err.Error(), "no NCCL") ||
		!strings.Contains(err.Error(), "missing.so") {
		t.Errorf("a missing library: %v", err)
	}
}

func letters(r rune) rune {
	if r >= 'a' && r <= 'z' {
		return r
	}
	return -1
}

func TestUnknown(t *testing.T) {
	if _, err := Find("pvm"); err == nil || !strings.Contains(err.Error(),
		`no library "pvm": want one of mpi, nccl, cuda`) {
		t.Errorf("%v", err)
	}
}

func TestNumbers(t *testing.T) {
	for n, want := range map[int]string{2804: "2.8.4", 21801: "2.18.1", 22005: "2.20.5"} {
		if got := ncclNumber(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
	if got := firstLine([]byte("a b \x00c")); got != "a b" {
		t.Errorf("%q", got)
	}
}
