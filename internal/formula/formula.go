// Package formula prints what tests of large jobs have counted beside a formula, in lines that .ci/long collects in one
// table.
package formula

import (
	"strconv"
	"testing"
)

// Row prints a count and what a formula gives, with the formula. Head prints the names of these columns.
func Row(t testing.TB, what string, count, formula int, text string) {
	t.Helper()
	row(t, what, thousands(count), thousands(formula), text)
}

// Head prints the heads of the columns.
func Head(t testing.TB) {
	t.Helper()
	row(t, "", "counted", "formula", "")
}

// row prints a line that begins with |, by which .ci/long finds it.
func row(t testing.TB, what, count, formula, text string) {
	t.Helper()
	t.Logf("| %-56s %15s %15s  %s", what, count, formula, text)
}

// thousands returns a number with commas: 1,234,567.
func thousands(n int) string {
	s := strconv.Itoa(n)
	for at := len(s) - 3; at > 0 && s[at-1] != '-'; at -= 3 {
		s = s[:at] + "," + s[at:]
	}
	return s
}
