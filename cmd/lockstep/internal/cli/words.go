package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/rivo/uniseg"
)

// AllOf joins names: a, b and c.
func AllOf(list []string) string {
	if len(list) == 1 {
		return list[0]
	}
	last := len(list) - 1
	return strings.Join(list[:last], ", ") + " and " + list[last]
}

// OneOf joins alternatives: a, b or c.
func OneOf(list []string) string {
	last := len(list) - 1
	return strings.Join(list[:last], ", ") + " or " + list[last]
}

// Sorted returns the keys of a table, in order.
func Sorted[T any](table map[string]T) []string { return slices.Sorted(maps.Keys(table)) }

// WrapWords splits text at spaces into lines of at most columns columns.
func WrapWords(text string, columns int) (lines []string) {
	line := ""
	for i, word := range strings.Split(text, " ") {
		switch {
		case i == 0:
			line = word
		case TextWidth(line+" "+word) <= columns:
			line += " " + word
		default:
			lines, line = append(lines, line), word
		}
	}
	return append(lines, line)
}

// Count prints a number with its noun: 1 step, 1,200 steps.
func Count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return Grouped(n) + " " + noun + "s"
}

// Grouped prints a number with commas: 1,234,567.
func Grouped(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Round keeps about three digits.
func Round(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit)
}

// TextWidth returns the columns of a terminal that a text takes: two for some characters, none for others.
func TextWidth(text string) int { return uniseg.StringWidth(text) }
