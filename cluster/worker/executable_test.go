package worker

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
)

// Forms of the identity of an executable.
var (
	byBuildID = regexp.MustCompile(`^Go build [\w-]{20} of [0-9]+ bytes$`)
	byHash    = regexp.MustCompile(`^[0-9a-f]{16}$`)
)

// identityOf returns the identity of the executable in path.
func identityOf(t *testing.T, path string) string {
	t.Helper()
	id, err := identify(path)
	if err != nil {
		t.Fatal(err)
	}
	if !byBuildID.MatchString(id) && !byHash.MatchString(id) {
		t.Fatalf("the identity is %q", id)
	}
	return id
}

// TestExecutableChanged: this test's executable is identified by its build ID, unless a changed copy has none of the go
// command's form. No changed copy has the identity of the original.
func TestExecutableChanged(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	own, err := Executable()
	if err != nil {
		t.Fatal(err)
	}
	if got := identityOf(t, self); got != own {
		t.Errorf("the identity is %q, and by the path %q", own, got)
	}
	text, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	id := regexp.MustCompile(`Go\x00\x00[\w-]{20}(/[\w-]{20}){3}`).Find(text)
	if !bytes.HasPrefix(text, []byte("\x7fELF")) || id == nil {
		if !byHash.MatchString(own) {
			t.Errorf("the identity of an executable without the note is %q, want a hash", own)
		}
		t.Skip("needs an ELF executable of the go command")
	}
	if !byBuildID.MatchString(own) || !strings.Contains(own, string(id[len(id)-20:])) {
		t.Errorf("the identity is %q, want the last part of %q", own, id)
	}
	replaced := func(old, by []byte) []byte { return bytes.ReplaceAll(text, old, by) }
	constant := append([]byte("Go\x00\x00"), bytes.Repeat([]byte("x"), len(id)-4)...)
	linked := append(bytes.Clone(id[:len(id)-20]), id[4:24]...)
	for name, c := range map[string]struct {
		text []byte
		form *regexp.Regexp
	}{
		"bytes appended":  {append(bytes.Clone(text), 0), byBuildID},
		"other content":   {replaced(id, append(bytes.Clone(id[:len(id)-20]), "AAAAAAAAAAAAAAAAAAAA"...)), byBuildID},
		"constant ID":     {replaced(id, constant), byHash},
		"not updated":     {replaced(id, linked), byHash},
		"other note":      {replaced([]byte("Go\x00\x00"+string(id[4:])), append([]byte("No\x00\x00"), id[4:]...)), byHash},
		"without the ID":  {replaced([]byte(".note.go.buildid\x00"), []byte(".note.go.nothing\x00")), byHash},
		"another format":  {append([]byte("MZ"), text[2:]...), byHash},
		"cut in the head": {text[:40], byHash},
		"empty":           {nil, byHash},
	} {
		path := filepath.Join(t.TempDir(), "executable")
		if err := os.WriteFile(path, c.text, 0o600); err != nil {
			t.Fatal(err)
		}
		got := identityOf(t, path)
		if got == own || !c.form.MatchString(got) {
			t.Errorf("%s: the identity is %q, of the original %q; want another one that matches %v", name, got, own, c.form)
		}
		os.Remove(path)
	}
	if _, err := identify(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a file that does not exist has an identity")
	}
}

// TestContentID: only an ID of the go command's form for executables identifies the content.
func TestContentID(t *testing.T) {
	a, b := strings.Repeat("a", 20), strings.Repeat("-", 19)+"_"
	for id, want := range map[string]string{
		a + "/" + a + "/" + a + "/" + b:            b,
		a + "/" + b + "/" + b + "/" + a:            "", // the linker's, before the go command has hashed the content
		a + "/" + b:                                "", // of a package
		a + "/" + a + "/" + a + "/" + a + "/" + b:  "",
		a + "/" + a + "/" + a + "/" + b + "b":      "",
		a + "/" + a + "/" + a + "/" + b[1:] + "+":  "",
		a + "/" + a + "/" + a + "/" + b[1:] + "\n": "",
		"":         "",
		"///":      "",
		"a/b/c/d":  "",
		"constant": "",
		"redacted": "",
	} {
		if got := contentID(id); got != want {
			t.Errorf("%q: got %q, want %q", id, got, want)
		}
	}
}

// TestExecutableBuilds: different programs have different identities, however they are built, and a program that is
// built twice has one.
func TestExecutableBuilds(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: builds programs")
	}
	dir := t.TempDir()
	build := func(name, source string, flags ...string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path+".go", []byte("package main\n\nfunc main() { "+source+" }\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("go", append(append([]string{"build", "-trimpath", "-o", path}, flags...), path+".go")...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
		return identityOf(t, path)
	}
	for name, c := range map[string]struct {
		flags []string
		elf   *regexp.Regexp
	}{
		"default":  {nil, byBuildID},
		"stripped": {[]string{"-ldflags=-s -w"}, byBuildID},
		"constant": {[]string{"-ldflags=-buildid=constant"}, byHash},
		"no ID":    {[]string{"-ldflags=-buildid="}, byHash},
	} {
		one, two := build("a", "println(1)", c.flags...), build("a", "println(2)", c.flags...)
		if one == two {
			t.Errorf("%s: two programs have the identity %q", name, one)
		}
		if again := build("a", "println(1)", c.flags...); again != one {
			t.Errorf("%s: a program is %q, and built again %q", name, one, again)
		}
		if runtime.GOOS == "linux" && !c.elf.MatchString(one) {
			t.Errorf("%s: the identity is %q, want one that matches %v", name, one, c.elf)
		}
	}
}
