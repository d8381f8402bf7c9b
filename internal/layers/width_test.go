package layers

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	goWidth       = 120
	markdownWidth = 100
)

// TestGoWidth checks that no line of Go is wider than goWidth, with a tab counted as one column. A raw string may be
// wider, since it cannot be broken, and so may generated code.
func TestGoWidth(t *testing.T) {
	walk(t, ".go", func(path, text string) {
		if strings.HasPrefix(text, "// Code generated ") {
			return
		}
		for number, line := range wideLines(text, goWidth, rawLines(text)) {
			columns := utf8.RuneCountInString(line)
			t.Errorf("%s:%d: %d columns: break the line at %d\n%s", path, number, columns, goWidth, line)
		}
	})
}

// TestMarkdownWidth checks that Markdown is wrapped at markdownWidth. Tables, headings, code and lines without a space
// at which to break may be wider.
func TestMarkdownWidth(t *testing.T) {
	walk(t, ".md", func(path, text string) {
		for number, line := range wideLines(text, markdownWidth, codeLines(text)) {
			start := strings.TrimLeft(line, " ")
			words := strings.Fields(strings.TrimLeft(start, "-*> "))
			if strings.HasPrefix(start, "|") || strings.HasPrefix(start, "#") || len(words) < 2 {
				continue
			}
			columns := utf8.RuneCountInString(line)
			t.Errorf("%s:%d: %d columns: wrap the line at %d\n%s", path, number, columns, markdownWidth, line)
		}
	})
}

// wideLines returns the lines that are wider than columns, by number (the first is 1), without the exempt ones.
func wideLines(text string, columns int, exempt map[int]bool) map[int]string {
	found := map[int]string{}
	number := 0
	for line := range strings.Lines(text) {
		number++
		if line = strings.TrimRight(line, "\r\n"); utf8.RuneCountInString(line) > columns && !exempt[number] {
			found[number] = line
		}
	}
	return found
}

// rawLines returns the numbers of the lines on which a raw string goes beyond goWidth.
func rawLines(text string) map[int]bool {
	lines := map[int]bool{}
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, []byte(text), nil, 0)
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			return lines
		}
		if tok != token.STRING || literal[0] != '`' {
			continue
		}
		column := file.Position(pos).Column
		for i, part := range strings.Split(literal, "\n") {
			if column+utf8.RuneCountInString(part)-1 > goWidth {
				lines[file.Line(pos)+i] = true
			}
			column = 1
		}
	}
}

// codeLines returns the numbers of the lines of code: fenced, or indented by at least four columns.
func codeLines(text string) map[int]bool {
	lines := map[int]bool{}
	number, fenced := 0, false
	for line := range strings.Lines(text) {
		number++
		fence := strings.HasPrefix(strings.TrimLeft(line, " "), "```")
		lines[number] = fenced || fence || strings.HasPrefix(line, "    ")
		if fence {
			fenced = !fenced
		}
	}
	return lines
}

// walk calls f for every file of the module with the extension, with its path from the module's root and its text.
func walk(t *testing.T, extension string, f func(path, text string)) {
	t.Helper()
	root := filepath.Join("..", "..")
	files := 0
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != root && (strings.HasPrefix(e.Name(), ".") || e.Name() == "testdata"):
			return filepath.SkipDir
		case e.IsDir() || filepath.Ext(path) != extension:
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files++
		name, err := filepath.Rel(root, path)
		f(name, string(text))
		return err
	})
	if err != nil || files == 0 {
		t.Fatalf("%d files: %v", files, err)
	}
}
