package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// display shows a few lines at the bottom of a terminal, which are drawn again in place, below lines that scroll. Its
// methods can be called by any goroutine at any time.
type display struct {
	out  io.Writer                  // the terminal
	size func() (columns, rows int) // of the terminal
	// lines returns the lines for a terminal of so many columns and rows. None may be wider.
	lines func(columns, rows int) []string

	mu      sync.Mutex // guards the fields below
	widths  []int      // of the lines on the screen
	columns int        // of the terminal when they were drawn
	text    []byte     // what was drawn
	closed  bool
}

// displayEvery is how often a display is drawn again.
const displayEvery = 500 * time.Millisecond

// newDisplay returns a display on a terminal.
func newDisplay(terminal *os.File, lines func(columns, rows int) []string) *display {
	return &display{out: terminal, lines: lines, size: func() (columns, rows int) {
		columns, rows, err := term.GetSize(int(terminal.Fd()))
		if err != nil || columns <= 0 || rows <= 0 {
			return 80, 24
		}
		return columns, rows
	}}
}

// isTerminal reports whether a file is a terminal on which lines can be drawn again.
func isTerminal(file *os.File) bool {
	return term.IsTerminal(int(file.Fd())) && os.Getenv("TERM") != "dumb"
}

// Write writes whole lines above those of the display.
func (d *display) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.widths) == 0 {
		return d.out.Write(p)
	}
	out := append(d.erase(), p...)
	if !bytes.HasSuffix(p, []byte("\n")) {
		out = append(out, '\n')
	}
	if _, err := d.out.Write(append(out, d.draw()...)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Stat describes the terminal.
func (d *display) Stat() (fs.FileInfo, error) {
	if f, ok := d.out.(*os.File); ok {
		return f.Stat()
	}
	return nil, errors.ErrUnsupported
}

// redraw draws the lines again if they, or the size of the terminal, have changed. The error is the terminal's.
func (d *display) redraw() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	out, before, columns := d.erase(), d.text, d.columns
	text := d.draw()
	if bytes.Equal(text, before) && columns == d.columns {
		return nil
	}
	_, err := d.out.Write(append(out, text...))
	return err
}

// close ends the display. The lines are removed from the screen unless they are kept. It waits for a terminal that
// accepts nothing for a short time only.
func (d *display) close(keep bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.mu.Lock()
		defer d.mu.Unlock()
		if !d.closed && !keep {
			_, _ = d.out.Write(d.erase()) // a closed terminal shows nothing
		}
		d.closed = true
	}()
	select {
	case <-done:
	case <-time.After(displayEvery):
	}
}

// erase returns what moves the cursor to the first line of the display and clears the rest of the screen. If the
// terminal has become narrower, it has wrapped lines. The caller holds the lock.
func (d *display) erase() []byte {
	columns, _ := d.size()
	rows := 0
	for _, width := range d.widths {
		rows += max(1, (width+columns-1)/columns)
	}
	if rows == 0 {
		return nil
	}
	return fmt.Appendf(nil, "\x1b[%dA\r\x1b[J", rows)
}

// draw returns the lines, and notes that they are on the screen. The caller holds the lock.
func (d *display) draw() []byte {
	columns, rows := d.size()
	d.columns, d.widths, d.text = columns, d.widths[:0], nil
	for _, line := range d.lines(columns, rows) {
		d.widths = append(d.widths, utf8.RuneCountInString(line))
		d.text = append(append(d.text, line...), '\n')
	}
	return d.text
}

// column is a column of a table of workers.
type column[T any] struct {
	head string
	left bool // aligned
	// need is the order in which columns are left out of a narrow table: those with the largest number first.
	need int
	cell func(row T) string
}

// fitColumns formats a table in at most so many columns of a terminal, 0 for any number, and leaves out what does not
// fit.
func fitColumns[T any](all []column[T], rows []T, width int) []string {
	cells, widths := make([][]string, len(all)), make([]int, len(all))
	total := -2
	for i, c := range all {
		cells[i] = []string{c.head}
		for _, row := range rows {
			cells[i] = append(cells[i], c.cell(row))
		}
		for _, text := range cells[i] {
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
		total += widths[i] + 2
	}
	dropped := make([]bool, len(all))
	for left := len(all); width > 0 && total > width && left > 1; left-- {
		worst := -1
		for i := range all {
			if !dropped[i] && (worst < 0 || all[i].need > all[worst].need) {
				worst = i
			}
		}
		dropped[worst] = true
		total -= widths[worst] + 2
	}
	lines := make([]string, len(rows)+1)
	for k := range lines {
		var parts []string
		for i, c := range all {
			switch {
			case dropped[i]:
			case c.left:
				parts = append(parts, fmt.Sprintf("%-*s", widths[i], cells[i][k]))
			default:
				parts = append(parts, fmt.Sprintf("%*s", widths[i], cells[i][k]))
			}
		}
		lines[k] = clipLine(strings.TrimRight(strings.Join(parts, "  "), " "), width)
	}
	return lines
}

// clipLine shortens a line to a width, unless that is 0.
func clipLine(line string, width int) string {
	if runes := []rune(line); width > 0 && len(runes) > width {
		return string(runes[:width-1]) + "…"
	}
	return line
}

// clipLines keeps at most so many lines.
func clipLines(lines []string, rows int) []string {
	return slices.Clip(lines[:min(len(lines), max(rows, 0))])
}

// periodically calls f now and every so often, until the function that it returns is called.
func periodically(every time.Duration, f func()) (stop func()) {
	done := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			f()
			select {
			case <-ticker.C:
			case <-done:
				return
			}
		}
	})
	return func() { close(done); work.Wait() }
}
