// Package stacks parses the runtime's text about goroutines: their numbers, their wait reasons and their stacks. It is
// used only after failures, where the cost of stopping the world does not matter. No function here belongs on a hot
// path, except [ID], which takes a few microseconds.
//
// The text is that of [runtime.Stack], of [runtime/debug.Stack] and of a crash. Parsing never fails: unknown text is
// skipped, so a change of the format only costs detail in error messages.
package stacks

import (
	"runtime"
	"strconv"
	"strings"
)

// BytesMax bounds the length of the text that [Snapshot] requests from the runtime.
const BytesMax = 64 << 20

// Goroutine is the state of one goroutine in a snapshot.
type Goroutine struct {
	ID        uint64  // 0 if unknown
	State     string  // "running", "chan receive", "select", "sync.Mutex.Lock", "sleep", …
	Minutes   int     // for how long it has been blocked, in whole minutes
	Frames    []Frame // innermost call first; the runtime omits the middle of a very deep stack
	CreatedBy Frame   // the go statement that started it; zero for the main goroutine
	Creator   uint64  // the goroutine that started it, or 0 if unknown
}

// Frame is one function call on a stack.
type Frame struct {
	Func string // with its package path: "example.com/pkg.(*T).Method.func1"; type arguments are "[...]"
	File string // as recorded by the compiler: absolute, or starting with the module's path if built with -trimpath
	Line int    // 0 if unknown
}

// String returns "file:line (function)".
func (f Frame) String() string {
	if f.File == "" {
		return f.Func
	}
	return f.File + ":" + strconv.Itoa(f.Line) + " (" + f.Name() + ")"
}

// Name returns the function with only the last element of its package path: "pkg.(*T).Method.func1".
func (f Frame) Name() string {
	return f.Func[pathEnd(f.Func):]
}

// pathEnd returns the index of the last element of the package path in a function's name. A receiver or type argument
// may contain slashes, so only the part before the first bracket counts.
func pathEnd(name string) int {
	path := name
	if i := strings.IndexAny(path, "([{"); i >= 0 {
		path = path[:i]
	}
	return strings.LastIndexByte(path, '/') + 1
}

// Snapshot stops the world and returns all goroutines, the calling one first. If their text is longer than [BytesMax],
// the last ones are missing.
func Snapshot() []Goroutine {
	for size := 64 << 10; ; size *= 4 {
		size = min(size, BytesMax)
		buf := make([]byte, size)
		n := runtime.Stack(buf, true)
		if n < size || size == BytesMax {
			return Parse(string(buf[:n]))
		}
	}
}

// ID returns the number of the calling goroutine, 0 if it cannot be determined. It is meant to be called once in
// the life of a goroutine, near the foot of its stack, where it is cheapest.
func ID() uint64 {
	var buf [64]byte
	text := string(buf[:runtime.Stack(buf[:], false)])
	id, _, _ := number(strings.TrimPrefix(text, "goroutine "))
	return id
}

// Self returns the calling goroutine.
func Self() Goroutine {
	for size := 4 << 10; ; size *= 4 {
		buf := make([]byte, size)
		n := runtime.Stack(buf, false)
		if n < size || size >= BytesMax {
			all := Parse(string(buf[:n]))
			if len(all) == 0 {
				return Goroutine{}
			}
			return all[0]
		}
	}
}
