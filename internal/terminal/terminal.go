// Package terminal reports whether an output is a terminal, and how wide it is.
package terminal

import (
	"io"
	"os"

	"golang.org/x/term"
)

// Columns reports whether out is a terminal: a file, or a writer with a file's method Fd. It returns a function that
// returns its current width in columns, 80 if that is unknown. Any goroutine may call it.
func Columns(out io.Writer) (columns func() int, isTerminal bool) {
	f, ok := out.(interface{ Fd() uintptr })
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, false
	}
	return func() int {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			return width
		}
		return 80
	}, true
}

// CanRedraw reports whether out is a terminal on which lines can be drawn again.
func CanRedraw(out io.Writer) bool {
	_, isTerminal := Columns(out)
	return isTerminal && os.Getenv("TERM") != "dumb"
}
