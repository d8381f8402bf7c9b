package stacks

import (
	"reflect"
	"runtime"
	"strings"
	"sync"
)

// User reports whether a frame is of the user's code: neither the standard library's nor Lockstep's.
func (f Frame) User() bool { return !f.Standard() && !f.Library() }

// Library reports whether a frame is of Lockstep itself: its module's packages, except commands, examples and
// tests, which are users like any other.
func (f Frame) Library() bool {
	rest, ok := strings.CutPrefix(f.Func, modulePath()+"/")
	if !ok || strings.HasSuffix(f.File, "_test.go") {
		return false
	}
	return !strings.HasPrefix(rest, "cmd/") && !strings.HasPrefix(rest, "examples/")
}

// Standard reports whether a frame is of Go's standard library.
func (f Frame) Standard() bool {
	if root := standardRoot(); root != "" {
		return strings.HasPrefix(f.File, root)
	}
	// Built with -trimpath: standard packages are those whose path starts with a word without a dot.
	first, _, _ := strings.Cut(f.Func, "/")
	if !strings.Contains(f.Func, "/") {
		first, _, _ = strings.Cut(f.Func, ".")
	}
	return first != "main" && !strings.Contains(first, ".")
}

// modulePath is the path of the module, standardRoot the folder of the standard library's files, or empty if the
// program was built without it.
var (
	modulePath = sync.OnceValue(func() string {
		return strings.TrimSuffix(reflect.TypeFor[Frame]().PkgPath(), "/internal/stacks")
	})

	standardRoot = sync.OnceValue(func() string {
		f := runtime.FuncForPC(reflect.ValueOf(strings.Cut).Pointer())
		file, _ := f.FileLine(f.Entry())
		root, ok := strings.CutSuffix(file, "strings/strings.go")
		if !ok {
			return ""
		}
		return root
	})
)
