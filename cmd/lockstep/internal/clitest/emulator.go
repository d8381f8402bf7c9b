package clitest

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// Emulator is a slow terminal of so many columns, without a limit of rows. When its size changes, it wraps lines again.
type Emulator struct {
	T       *testing.T
	Columns int
	Lines   []string // without their wraps; the last one is that of the cursor
}

func (e *Emulator) rows(line string) int {
	rows, left := 1, e.Columns
	for _, r := range line {
		width := 1
		if r == '漢' {
			width = 2
		}
		if left -= width; left < 0 {
			rows, left = rows+1, e.Columns-width
		}
	}
	return rows
}

func (e *Emulator) Write(p []byte) (int, error) {
	for text := strings.ReplaceAll(string(p), "\x1b[m", ""); text != ""; {
		if m := escape.FindStringSubmatch(text); m != nil {
			up, _ := strconv.Atoi(m[1])
			e.Lines = e.Lines[:len(e.Lines)-1] // the line of the cursor is empty
			for ; up > 0 && len(e.Lines) > 0; e.Lines = e.Lines[:len(e.Lines)-1] {
				up -= e.rows(e.Lines[len(e.Lines)-1])
			}
			if up != 0 {
				e.T.Errorf("the cursor moved to %d rows from the first one of a line", up)
			}
			e.Lines = append(e.Lines, "")
			text = text[len(m[0]):]
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		if text = text[n:]; r == '\n' {
			e.Lines = append(e.Lines, "")
		} else {
			e.Lines[len(e.Lines)-1] += string(r)
		}
	}
	return len(p), nil
}

var escape = regexp.MustCompile(`^\x1b\[(\d+)A\r\x1b\[J`)
