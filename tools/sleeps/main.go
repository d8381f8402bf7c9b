// Command sleeps tests packages in a build that sleeps at random points: before operations on channels, locks, atomics,
// connections and timers, and before goroutines start. Event orders that need hours under load occur in minutes.
//
//	go run -C tools ./sleeps -seed 7 ./collective/... ./cluster/worker -- -short -timeout 20m
//
// Arguments after -- are passed to go test. The sources are not changed: the build reads the rewritten files from a
// temporary folder (go build -overlay). The seed decides which points sleep, and how long. A failed run prints its
// seed. To repeat the run with a test binary that was kept, set LOCKSTEP_SLEEPS=SEED:EVERY:MAX:VISITS.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	modulePath  = "github.com/lockstep-ml/lockstep"
	packagePath = modulePath + "/internal/sleepat"
)

func main() {
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the choice of points and of the times")
	every := flag.Int("every", 40, "sleep at one of this many points")
	longest := flag.Duration("max", 120*time.Millisecond, "maximum sleep")
	visits := flag.Int("visits", 8, "maximum number of sleeps at a point, so that tests with many steps end")
	only := flag.Bool("build", false, "only print the flag for go build or go test, -overlay=FILE, and keep the folder")
	flag.Parse()
	if err := run(*seed, *every, *visits, *longest, *only, flag.Args()); err != nil {
		fmt.Fprintf(os.Stderr,
			"sleeps: %v\nrepeat it with: go run -C tools ./sleeps -seed %d -every %d -max %v -visits %d %s\n",
			err, *seed, *every, *longest, *visits, strings.Join(flag.Args(), " "))
		os.Exit(1)
	}
}

func run(seed uint64, every, visits int, longest time.Duration, only bool, args []string) error {
	if every < 1 || visits < 1 || longest <= 0 {
		return fmt.Errorf("-every %d, -visits %d, -max %v: want positive numbers", every, visits, longest)
	}
	packages, flags := args, []string(nil)
	if i := slices.Index(args, "--"); i >= 0 {
		packages, flags = args[:i], args[i+1:]
	}
	if len(packages) == 0 {
		return fmt.Errorf("no packages: want some, such as ./collective/...")
	}
	root, err := output(".", "go", "list", "-m", "-f", "{{.Dir}}", modulePath)
	if err != nil {
		if root, err = filepath.Abs(".."); err != nil {
			return err
		}
	}
	root = strings.TrimSpace(root)
	folder, err := os.MkdirTemp("", "sleeps-")
	if err != nil {
		return err
	}
	if !only {
		defer os.RemoveAll(folder)
	}
	overlay, points, err := rewrite(root, folder)
	if err != nil {
		return err
	}
	if only {
		fmt.Println("-overlay=" + overlay)
		return nil
	}
	fmt.Printf("sleeps: %d points, seed %d, one in %d sleeps up to %v, at most %d times\n", points, seed, every, longest,
		visits)
	cmd := exec.Command("go", append(append([]string{"test", "-count", "1", "-vet=off", "-overlay", overlay}, packages...),
		flags...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = root, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), fmt.Sprintf("LOCKSTEP_SLEEPS=%d:%d:%v:%d", seed, every, longest, visits))
	return cmd.Run()
}

// rewrite inserts a call at every point in the module's files. It writes the changed files and the overlay file, which
// replaces the originals with them, into the folder. It returns the overlay file and the number of points.
func rewrite(root, folder string) (overlay string, points int, err error) {
	listed, err := output(root, "go", "list", "-f", "{{$d := .Dir}}{{range .GoFiles}}{{$d}}/{{.}}\n{{end}}", "./...")
	if err != nil {
		return "", 0, err
	}
	replace := map[string]string{}
	add := func(original string, text []byte) error {
		copied := filepath.Join(folder, strconv.Itoa(len(replace))+".go")
		replace[original] = copied
		return os.WriteFile(copied, text, 0o644)
	}
	for name := range strings.FieldsSeq(listed) {
		text, n, err := withPoints(name, points)
		if err != nil {
			return "", 0, err
		}
		if n == 0 {
			continue
		}
		points += n
		if err := add(name, text); err != nil {
			return "", 0, err
		}
	}
	at := filepath.Join(root, "internal", "sleepat")
	if err := errors.Join(add(filepath.Join(at, "sleepat.go"), []byte(pointSource)),
		add(filepath.Join(at, "pause_linux.go"), []byte(pauseLinux)),
		add(filepath.Join(at, "pause_other.go"), []byte(pauseOther))); err != nil {
		return "", 0, err
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", 0, err
	}
	overlay = filepath.Join(folder, "overlay.json")
	return overlay, points, os.WriteFile(overlay, text, 0o644)
}

// calls are the methods and functions that have a point before them.
var calls = []string{
	"Lock", "RLock", "Unlock", "RUnlock", "TryLock", "Load", "Store", "Add", "Swap", "CompareAndSwap", "And", "Or", "Wait",
	"Signal", "Broadcast",
	"Done", "Go", "Do", "Read", "Write", "Accept", "Dial", "DialContext", "Close", "CloseWrite", "ReadFull", "Reset",
	"Stop", "AfterFunc", "Sleep",
	"WriteTo", "ReadFrom", "SetDeadline", "SetReadDeadline", "SetWriteDeadline", "Kill", "Start", "Sync", "Rename",
	"Remove",
}

// withPoints returns the text of a file with a call before each statement that has a point, on the same line.
func withPoints(name string, first int) (text []byte, points int, err error) {
	source, err := os.ReadFile(name)
	if err != nil {
		return nil, 0, err
	}
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, name, source, parser.SkipObjectResolution)
	if err != nil {
		return nil, 0, err
	}
	for _, imported := range f.Imports {
		if imported.Path.Value == `"C"` {
			return nil, 0, nil
		}
	}
	var at []int
	ast.Inspect(f, func(n ast.Node) bool {
		if fn, ok := n.(*ast.FuncDecl); ok && (fn.Body == nil || pinned(fn)) {
			return false
		}
		for _, s := range statements(n) {
			if hasPoint(s) {
				at = append(at, files.Position(s.Pos()).Offset)
			}
		}
		return true
	})
	if len(at) == 0 {
		return nil, 0, nil
	}
	slices.Sort(at)
	var b bytes.Buffer
	clause := files.Position(f.Name.End()).Offset
	b.Write(source[:clause])
	fmt.Fprintf(&b, "; import sleepat %q", packagePath)
	done := clause
	for i, offset := range at {
		b.Write(source[done:offset])
		fmt.Fprintf(&b, "sleepat.At(%d); ", first+i)
		done = offset
	}
	b.Write(source[done:])
	return b.Bytes(), len(at), nil
}

// pinned reports whether a function must not be changed, or runs where blocking is not allowed.
func pinned(fn *ast.FuncDecl) bool {
	if fn.Doc == nil {
		return false
	}
	return slices.ContainsFunc(fn.Doc.List, func(c *ast.Comment) bool { return strings.HasPrefix(c.Text, "//go:") })
}

func statements(n ast.Node) []ast.Stmt {
	switch n := n.(type) {
	case *ast.BlockStmt:
		return n.List
	case *ast.CaseClause:
		return n.Body
	case *ast.CommClause:
		return n.Body
	}
	return nil
}

// hasPoint reports whether a statement itself, not a block in it, waits, wakes a goroutine, or accesses shared state.
func hasPoint(s ast.Stmt) bool {
	found := false
	ast.Inspect(s, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt, *ast.FuncLit, *ast.CaseClause, *ast.CommClause:
			return false
		case *ast.SendStmt, *ast.GoStmt, *ast.SelectStmt:
			found = true
		case *ast.UnaryExpr:
			found = found || n.Op == token.ARROW
		case *ast.CallExpr:
			switch f := n.Fun.(type) {
			case *ast.SelectorExpr:
				found = found || slices.Contains(calls, f.Sel.Name)
			case *ast.Ident:
				found = found || f.Name == "close"
			}
		}
		return !found
	})
	return found
}

func output(dir, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); err != nil {
		if e, ok := err.(*exec.ExitError); ok {
			exit = e
			return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, exit.Stderr)
		}
		return "", err
	}
	return string(out), nil
}

// pointSource is the package that the rewritten files call.
const pointSource = `// Package sleepat sleeps at the inserted points. It exists only in builds of tools/sleeps.
package sleepat

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var settings = sync.OnceValue(func() (s struct {
	seed, every uint64
	longest     time.Duration
	visits      uint32
}) {
	var longest string
	fields := strings.Split(os.Getenv("LOCKSTEP_SLEEPS"), ":")
	if len(fields) != 4 {
		return s
	}
	longest = fields[2]
	s.longest, _ = time.ParseDuration(longest)
	fmt.Sscan(fields[0], &s.seed)
	fmt.Sscan(fields[1], &s.every)
	fmt.Sscan(fields[3], &s.visits)
	return s
})

var visited [1 << 16]atomic.Uint32

// At sleeps at point n if the seed selects it.
func At(n int) {
	s := settings()
	if s.every == 0 {
		return
	}
	h := mix(s.seed ^ uint64(n)*0x9e3779b97f4a7c15)
	if h%s.every != 0 || visited[n%len(visited)].Load() >= s.visits {
		return
	}
	visit := visited[n%len(visited)].Add(1)
	if h = mix(h ^ uint64(visit)); h%3 == 0 {
		return
	}
	pause(time.Duration(mix(h) % uint64(s.longest)))
}

func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
`

// The pause of a point. In a bubble of testing/synctest, time.Sleep waits until all other goroutines wait durably,
// which a goroutine that waits for a lock does not: a point that slept with the lock held would sleep forever. A system
// call sleeps in real time there too, and the time of the bubble does not pass.
const (
	pauseLinux = `package sleepat

import (
	"syscall"
	"time"
)

func pause(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	syscall.Nanosleep(&t, nil)
}
`
	pauseOther = `//go:build !linux

package sleepat

import "time"

func pause(d time.Duration) { time.Sleep(d) }
`
)
