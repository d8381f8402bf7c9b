package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// table prints rows of a name and a text in two columns. On a terminal, texts wrap within their column; only a
// word that is wider than the column exceeds it.
type table [][2]string

func (t *table) row(name, format string, args ...any) {
	*t = append(*t, [2]string{name, fmt.Sprintf(format, args...)})
}

func (t table) print(out io.Writer) error {
	names := 0
	for _, row := range t {
		names = max(names, len(row[0])+2)
	}
	width, isTerminal := terminalWidth(out)
	var b strings.Builder
	for _, row := range t {
		lines := []string{row[1]}
		if isTerminal {
			lines = wrapWords(row[1], width()-names)
		}
		for i, line := range lines {
			name := row[0]
			if i > 0 {
				name = ""
			}
			fmt.Fprintf(&b, "%-*s%s\n", names, name, line)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// wrapWords splits text at spaces into lines of at most columns columns.
func wrapWords(text string, columns int) (lines []string) {
	line := ""
	for i, word := range strings.Split(text, " ") {
		switch {
		case i == 0:
			line = word
		case textWidth(line+" "+word) <= columns:
			line += " " + word
		default:
			lines, line = append(lines, line), word
		}
	}
	return append(lines, line)
}

// terminalWidth reports whether out is a terminal, and returns a function that returns its current columns.
func terminalWidth(out io.Writer) (width func() int, isTerminal bool) {
	f, ok := out.(*os.File)
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

// count prints a number with its noun: 1 step, 1,200 steps.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return grouped(n) + " " + noun + "s"
}

// grouped prints a number with commas: 1,234,567.
func grouped(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
