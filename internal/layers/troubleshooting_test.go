package layers

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// gap replaces the parts of a text that vary: a format verb, or a concatenated operand that is not a literal.
const gap = "\x00"

var (
	// entry is a heading of docs/troubleshooting.md, and the block with the message that follows it.
	entry   = regexp.MustCompile("(?ms)^### ([^\n]+)\n\n```\n(.*?)\n```\n")
	heading = regexp.MustCompile("(?m)^### ")
	verb    = regexp.MustCompile(`%[-+# 0]*(\[\d+\])?[\d.*]*[a-zA-Z]`)
)

// leastChecked is the length of the parts of a message that are checked, in bytes: shorter ones occur everywhere.
const leastChecked = 7

// TestTroubleshooting checks that the code still contains the messages that docs/troubleshooting.md quotes. Every part
// between two … must occur in a string literal. A part may also cross wrapped errors, "outer: inner": then each of the
// texts must occur.
func TestTroubleshooting(t *testing.T) {
	page := read(t, "../../docs/troubleshooting.md")
	entries := entry.FindAllStringSubmatch(page, -1)
	if headings := len(heading.FindAllString(page, -1)); len(entries) != headings || headings < 18 {
		t.Errorf("%d of %d entries have a message right after the heading: want all, and at least 18 entries",
			len(entries), headings)
	}
	literals := stringLiterals(t)
	for _, e := range entries {
		checked := 0
		for line := range strings.SplitSeq(e[2], "\n") {
			for part := range strings.SplitSeq(line, "…") {
				texts := []string{part}
				if !strings.Contains(literals, strings.TrimSpace(part)) {
					texts = strings.Split(part, ": ")
				}
				for _, text := range texts {
					if text = strings.Trim(text, " :;,."); len(text) < leastChecked {
						continue
					}
					if checked++; !strings.Contains(literals, text) {
						t.Errorf("entry %q: no string literal of the code contains %q: "+
							"quote the message as the code prints it now, with … in place of what varies", e[1], text)
					}
				}
			}
		}
		if checked == 0 {
			t.Errorf("entry %q: its message has no part of %d characters or more", e[1], leastChecked)
		}
	}
}

// stringLiterals returns all string literals of the project's Go files, without tests and testdata. Each is contained
// once as written, and once with gaps in place of its format verbs.
func stringLiterals(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == "testdata" || strings.HasPrefix(name, ".") && name != "..") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text, found := joined(e)
			if !found {
				return true
			}
			all.WriteString(text + gap + strings.ReplaceAll(verb.ReplaceAllString(text, gap), "%%", "%") + gap)
			return false
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// joined returns a string literal's value, or that of a concatenation with at least one literal.
func joined(e ast.Expr) (text string, found bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			text, err := strconv.Unquote(e.Value)
			return text, err == nil
		}
	case *ast.ParenExpr:
		return joined(e.X)
	case *ast.BinaryExpr:
		if e.Op != token.ADD {
			return "", false
		}
		x, inX := joined(e.X)
		y, inY := joined(e.Y)
		if !inX && !inY {
			return "", false
		}
		if !inX {
			x = gap
		}
		if !inY {
			y = gap
		}
		return x + y, true
	}
	return "", false
}
