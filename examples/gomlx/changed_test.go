// Package gomlx_test compares the examples that use GoMLX's own loop with and without other workers.
package gomlx_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestChangedLines counts the lines by which a program for several workers differs from the program for one process,
// except for the first, a comment. Docs promise at most ten.
func TestChangedLines(t *testing.T) {
	for _, name := range []string{"mnist", "adult"} {
		plain, distributed := lines(t, name, "plain"), lines(t, name, "distributed")
		n := len(distributed) - common(plain, distributed)
		t.Logf("%s: %d of %d lines", name, n, len(distributed))
		if n < 1 || n > 10 {
			t.Errorf("%s: %d lines differ, want at most 10", name, n)
		}
	}
}

func lines(t *testing.T, name, command string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(name, command, "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(text), "\n")[1:]
}

// common returns the length of the longest common subsequence.
func common(a, b []string) int {
	row := make([]int, len(b)+1)
	for _, x := range a {
		before := 0
		for j, y := range b {
			above := row[j+1]
			if x == y {
				row[j+1] = before + 1
			} else {
				row[j+1] = max(above, row[j])
			}
			before = above
		}
	}
	return row[len(b)]
}
