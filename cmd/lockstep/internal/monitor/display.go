package monitor

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/rivo/uniseg"
	"golang.org/x/term"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
)

// display shows a few lines at the bottom of a terminal, which are drawn again in place, below lines that scroll. Its
// methods can be called by any goroutine at any time.
type display struct {
	out  io.Writer                  // the terminal
	size func() (columns, rows int) // of the terminal
	// foreground reports whether the lines may be drawn: the terminal is the shell's while this process runs in the
	// background.
	foreground func() bool
	// continued receives when the process continues after it was suspended: the shell has written below the lines since.
	// It may be nil.
	continued <-chan os.Signal
	ascii     bool // the terminal does not show UTF-8
	// lines returns the lines for a terminal of so many columns and rows. None may be wider.
	lines func(columns, rows int) []string

	mu      sync.Mutex // guards the fields below
	drawn   []string   // the lines on the screen
	columns int        // of the terminal when they were drawn
	rows    int        // of the terminal then
	text    []byte     // the lines on the screen, as they were written
	closed  bool
}

// displayEvery is how often a display is drawn again.
const displayEvery = 500 * time.Millisecond

// newDisplay returns a display on a terminal.
func newDisplay(terminal *os.File, lines func(columns, rows int) []string) *display {
	size := func() (columns, rows int) {
		columns, rows, err := term.GetSize(int(terminal.Fd()))
		if err != nil || columns <= 0 || rows <= 0 {
			return 80, 24
		}
		return columns, rows
	}
	return &display{
		out: terminal, lines: lines, size: size, foreground: func() bool { return inForeground(int(terminal.Fd())) },
		continued: notifyContinued(), ascii: !utf8Locale(os.Getenv),
	}
}

// asciiLines replaces what the lines of a display have beside ASCII, apart from names.
var asciiLines = strings.NewReplacer("─", "-", "…", ".")

// utf8Locale reports whether the locale's characters are UTF-8, or unknown.
func utf8Locale(getenv func(string) string) bool {
	locale := strings.ToLower(cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG")))
	return locale == "" || strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")
}

// Write writes whole lines above those of the display, which stay as they are until the next redraw.
func (d *display) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || !d.mayDraw() || len(d.drawn) == 0 {
		return d.out.Write(p)
	}
	out := append(d.erase(), p...)
	if !bytes.HasSuffix(p, []byte("\n")) {
		out = append(out, '\n')
	}
	if bytes.IndexByte(p, '\x1b') >= 0 {
		out = append(out, plainText...)
	}
	if columns, rows := d.size(); columns != d.columns || rows != d.rows {
		d.draw()
	}
	if _, err := d.out.Write(append(out, d.text...)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// plainText ends colours, and sequences that a line above the display has left incomplete.
const plainText = "\x1b[m"

// mayDraw reports whether lines may be drawn. In the background the cursor is the shell's, and no longer below them,
// nor is it when the process continues. The caller holds the lock.
func (d *display) mayDraw() bool {
	may := d.foreground()
	select {
	case <-d.continued:
		d.drawn, d.text = nil, nil
	default:
	}
	if !may {
		d.drawn, d.text = nil, nil
	}
	return may
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
	if d.closed || !d.mayDraw() {
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
		if !d.closed && !keep && d.mayDraw() {
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
	rows := len(d.drawn)
	if columns, _ := d.size(); columns < d.columns {
		rows = 0
		for _, line := range d.drawn {
			rows += rowsOf(line, columns)
		}
	}
	if rows == 0 {
		return nil
	}
	return fmt.Appendf(nil, "\x1b[%dA\r\x1b[J", rows)
}

// draw returns the lines, and notes that they are on the screen. The caller holds the lock.
func (d *display) draw() []byte {
	d.columns, d.rows = d.size()
	d.drawn, d.text = d.lines(d.columns, d.rows), nil
	if d.ascii {
		for i, line := range d.drawn {
			d.drawn[i] = asciiLines.Replace(line)
		}
	}
	for _, line := range d.drawn {
		d.text = append(append(d.text, line...), '\n')
	}
	return d.text
}

// rowsOf returns how many rows of a terminal a line takes. A wide character that does not fit into a row begins the
// next one.
func rowsOf(line string, columns int) int {
	rows, used := 1, 0
	for g := uniseg.NewGraphemes(line); g.Next(); {
		width := g.Width()
		if used+width > columns {
			rows, used = rows+1, 0
		}
		used += width
	}
	return rows
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
			cells[i] = append(cells[i], printable(c.cell(row)))
		}
		for _, text := range cells[i] {
			widths[i] = max(widths[i], cli.TextWidth(text))
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
			text := cells[i][k]
			space := strings.Repeat(" ", widths[i]-cli.TextWidth(text))
			switch {
			case dropped[i]:
			case c.left:
				parts = append(parts, text+space)
			default:
				parts = append(parts, space+text)
			}
		}
		lines[k] = clipLine(strings.TrimRight(strings.Join(parts, "  "), " "), width)
	}
	return lines
}

// printable replaces the characters that would control a terminal. Names of hosts and errors come from other processes.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsPrint(r):
			return r
		}
		return unicode.ReplacementChar
	}, text)
}

// clipLine shortens a line to a width, unless that is 0.
func clipLine(line string, width int) string {
	if width <= 0 || cli.TextWidth(line) <= width {
		return line
	}
	var b strings.Builder
	used := 0
	for g := uniseg.NewGraphemes(line); g.Next(); b.WriteString(g.Str()) {
		if used += g.Width(); used >= width {
			break
		}
	}
	return b.String() + "…"
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
