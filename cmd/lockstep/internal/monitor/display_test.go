package monitor

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
)

// TestDisplay checks that the lines above a display are complete and in order, and that it is below them once, however
// it, the lines and the terminal change.
func TestDisplay(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		e := &clitest.Emulator{T: t, Columns: 20, Lines: []string{""}}
		var table, written []string
		d := &display{
			out: e, size: func() (int, int) { return e.Columns, 24 }, foreground: func() bool { return true },
			lines: func(columns, _ int) (out []string) {
				for _, line := range table {
					out = append(out, clipLine(line, columns))
				}
				return out
			},
		}
		for i := range 50 {
			switch r.IntN(4) {
			case 0:
				e.Columns = 10 + r.IntN(70)
			case 1:
				table = table[:0:0]
				for range r.IntN(6) {
					table = append(table, strings.Repeat([]string{"━", "漢", "━漢"}[r.IntN(3)], r.IntN(80)))
				}
			case 2:
				line := strings.Repeat(fmt.Sprint(i%10), r.IntN(100))
				written = append(written, line)
				fmt.Fprintln(d, line)
			}
			if err := d.redraw(); err != nil {
				t.Fatal(err)
			}
			want := append(slices.Clone(written), d.lines(e.Columns, 24)...)
			if got := e.Lines[:len(e.Lines)-1]; !slices.Equal(got, want) {
				t.Fatalf("%d columns: got\n%s\nwant\n%s", e.Columns, strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		}
		d.close(false)
		fmt.Fprintln(d, "end")
		if want := append(written, "end", ""); !slices.Equal(e.Lines, want) {
			t.Fatalf("at the end: got\n%q\nwant\n%q", e.Lines, want)
		}
	}
}

// TestDisplayInTheBackground: while the terminal is the shell's, output is written as it is, and nothing is erased.
func TestDisplayInTheBackground(t *testing.T) {
	e := &clitest.Emulator{T: t, Columns: 20, Lines: []string{""}}
	foreground, table := true, "table"
	d := &display{
		out: e, size: func() (int, int) { return e.Columns, 24 }, foreground: func() bool { return foreground },
		lines: func(int, int) []string { return []string{table} },
	}
	redraw := func() {
		t.Helper()
		if err := d.redraw(); err != nil {
			t.Fatal(err)
		}
	}
	redraw()
	foreground, table = false, "newer"
	fmt.Fprint(e, "$ a command\n")
	redraw()
	fmt.Fprintln(d, "output")
	fmt.Fprint(e, "$ fg\n")
	foreground = true
	redraw()
	fmt.Fprintln(d, "\x1b[31mred")
	want := []string{"table", "$ a command", "output", "$ fg", "\x1b[31mred", "newer", ""}
	if !slices.Equal(e.Lines, want) {
		t.Errorf("got\n%q\nwant\n%q", e.Lines, want)
	}
	foreground = false
	d.close(false)
	if !slices.Equal(e.Lines, want) {
		t.Errorf("the end in the background: got\n%q\nwant\n%q", e.Lines, want)
	}
}

// TestDisplayContinued: after the process was suspended, the lines are drawn below what the shell has written.
func TestDisplayContinued(t *testing.T) {
	e := &clitest.Emulator{T: t, Columns: 20, Lines: []string{""}}
	continued, table := make(chan os.Signal, 1), "─ table…"
	d := &display{
		out: e, size: func() (int, int) { return e.Columns, 24 }, foreground: func() bool { return true },
		continued: continued, lines: func(int, int) []string { return []string{table} }, ascii: true,
	}
	redraw := func() {
		t.Helper()
		if err := d.redraw(); err != nil {
			t.Fatal(err)
		}
	}
	redraw()
	fmt.Fprint(e, "[1]+  Stopped\n$ fg\n")
	continued <- syscall.SIGINT // any
	redraw()
	table = "newer"
	redraw()
	want := []string{"- table.", "[1]+  Stopped", "$ fg", "newer", ""}
	if !slices.Equal(e.Lines, want) {
		t.Errorf("got\n%q\nwant\n%q", e.Lines, want)
	}
}

func TestUTF8Locale(t *testing.T) {
	for _, c := range []struct {
		environment map[string]string
		want        bool
	}{
		{nil, true},
		{map[string]string{"LANG": "C.UTF-8"}, true},
		{map[string]string{"LANG": "de_DE.utf8", "LC_ALL": "C"}, false},
		{map[string]string{"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, true},
		{map[string]string{"LANG": "de_DE.ISO-8859-1"}, false},
	} {
		if got := utf8Locale(func(name string) string { return c.environment[name] }); got != c.want {
			t.Errorf("%v: %v", c.environment, got)
		}
	}
}

// TestDisplayReuse checks that output does not compute the lines again: it may be much.
func TestDisplayReuse(t *testing.T) {
	calls := 0
	d := &display{
		out: io.Discard, size: func() (int, int) { return 80, 24 }, foreground: func() bool { return true },
		lines: func(int, int) []string { calls++; return []string{"table"} },
	}
	if err := d.redraw(); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		fmt.Fprintln(d, "output")
	}
	if calls != 1 {
		t.Errorf("the lines were computed %d times: want once", calls)
	}
}
