package layers

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

var install = flag.String("install", "", "TestOutside also builds the examples of the README outside of this tree "+
	"and installs the command in this `folder`: it compiles everything once more")

// version is the release as which TestOutside serves this tree.
const version = "v0.1.0"

// TestOutside checks that a module outside of this tree can use the library and the command by the module path. It
// serves the files of this tree as a release, and every other module from the module cache.
func TestOutside(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a separate module: not with -short")
	}
	cache := strings.TrimSpace(command(t, ".", nil, "go", "env", "GOMODCACHE"))
	proxy, scratch := t.TempDir(), t.TempDir()
	if !publish(t, proxy, "../..") {
		t.Skip("the list of files is unknown: the tree is not a git repository")
	}
	goproxy := "file://" + proxy + ",file://" + filepath.Join(cache, "cache", "download")
	if p := strings.TrimSpace(command(t, ".", nil, "go", "env", "GOPROXY")); p != "" {
		goproxy += "," + p // modules that were never downloaded
	}
	env := []string{
		"GOPROXY=" + goproxy, "GOMODCACHE=" + filepath.Join(scratch, "mod"), "GOBIN=" + *install, "GOSUMDB=off",
		"GOFLAGS=-mod=mod -modcacherw -trimpath", "GOWORK=off", "GOTOOLCHAIN=local",
	}
	program := filepath.Join(scratch, "program")
	write(t, filepath.Join(program, "go.mod"), "module example.com/program\n\ngo 1.26\n")
	write(t, filepath.Join(program, "main.go"), outside)
	command(t, program, env, "go", "get", modulePath+"@latest")
	if got := strings.TrimSpace(command(t, program, env, "go", "run", ".")); got != "rank 0: [3], rank 1: [3]" {
		t.Errorf("the program outside printed %q", got)
	}
	want := fmt.Sprintf("%s %s <nil>\n", modulePath, version)
	if listed := command(t, program, env, "go", "list", "-m", "-f", "{{.Path}} {{.Version}} {{.Replace}}",
		modulePath); listed != want {
		t.Errorf("the module outside uses\n%swant\n%s", listed, want)
	}
	buildWithNewer(t, program, env)
	if *install == "" {
		return
	}
	command(t, program, env, "go", "build", modulePath+"/examples/...")
	command(t, scratch, env, "go", "install", modulePath+"/cmd/lockstep@latest")
	if got := command(t, scratch, nil, filepath.Join(*install, "lockstep"), "--version"); !strings.HasPrefix(got,
		"lockstep "+version+" ") {
		t.Errorf("lockstep --version printed %q, want version %s", got, version)
	}
}

// buildWithNewer builds the engine in a module that requires the newest versions of GoMLX's modules that this Go can
// build, which may be newer than ours.
func buildWithNewer(t *testing.T, program string, env []string) {
	t.Helper()
	list := []string{"github.com/gomlx/gomlx", "github.com/gomlx/compute", "github.com/gomlx/go-xla"}
	for _, path := range list {
		get := exec.Command("go", "get", path+"@latest")
		get.Dir, get.Env = program, append(os.Environ(), env...)
		if out, err := get.CombinedOutput(); err != nil {
			t.Logf("the newest %s is not required: %v\n%s", path, err, out)
		}
	}
	t.Logf("built with %s", command(t, program, env, "go", append([]string{"list", "-m"}, list...)...))
	command(t, program, env, "go", "build", modulePath+"/engine/...")
}

// outside sums a vector over two ranks.
const outside = `package main

import (
	"context"
	"fmt"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

func main() {
	group, err := collective.Open(mem.New(2), collective.Config{})
	if err != nil {
		panic(err)
	}
	defer group.Close()
	sums := make([][]float32, 2)
	var ranks sync.WaitGroup
	for rank, c := range group.Local() {
		ranks.Go(func() {
			sums[rank] = []float32{float32(rank + 1)}
			m := tensor.HostMemory(sums[rank])
			if err := c.Do(context.Background(), &collective.Call{
				Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32, Src: m, Dst: m,
			}); err != nil {
				panic(err)
			}
		})
	}
	ranks.Wait()
	fmt.Printf("rank 0: %v, rank 1: %v\n", sums[0], sums[1])
}
`

// publish puts the module in a folder into a proxy's folder, and reports whether git knows its files.
func publish(t *testing.T, proxy, folder string) bool {
	t.Helper()
	text := read(t, filepath.Join(folder, "go.mod"))
	m := module.Version{Path: modfile.ModulePath([]byte(text)), Version: version}
	list := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = folder
	names, err := list.Output()
	if err != nil {
		return false
	}
	var files []zip.File
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		if info, err := os.Lstat(filepath.Join(folder, name)); err == nil && info.Mode().IsRegular() &&
			!nested(folder, name) {
			files = append(files, file{folder, name})
		}
	}
	var b bytes.Buffer
	if err := zip.Create(&b, m, files); err != nil {
		t.Fatalf("%s is not a module that Go accepts: %v", folder, err)
	}
	at := filepath.Join(proxy, m.Path, "@v")
	write(t, filepath.Join(at, "list"), version+"\n")
	write(t, filepath.Join(at, version+".info"), fmt.Sprintf(`{"Version":%q,"Time":"2026-01-01T00:00:00Z"}`, version))
	write(t, filepath.Join(at, version+".mod"), text)
	write(t, filepath.Join(at, version+".zip"), b.String())
	return true
}

// nested reports whether a file belongs to a module below the folder.
func nested(folder, name string) bool {
	for dir := filepath.Dir(name); dir != "."; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(folder, dir, "go.mod")); err == nil {
			return true
		}
	}
	return false
}

// file is a file of a module, as package zip requires it.
type file struct{ folder, name string }

func (f file) Path() string                 { return f.name }
func (f file) Lstat() (fs.FileInfo, error)  { return os.Lstat(filepath.Join(f.folder, f.name)) }
func (f file) Open() (io.ReadCloser, error) { return os.Open(filepath.Join(f.folder, f.name)) }

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// command runs a program and returns its standard output.
func command(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = dir, append(os.Environ(), env...), &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, &stderr)
	}
	return string(out)
}
