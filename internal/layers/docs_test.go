package layers

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPagesShowTheExamples checks that every Go program in the README, the tutorial, and the last part of gomlx.md is
// an example, which has a test that runs it. A page may omit the part before "package main", or show only some
// consecutive lines.
func TestPagesShowTheExamples(t *testing.T) {
	var examples strings.Builder
	files, err := filepath.Glob("../../examples/*/main.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("examples: %v, %v", files, err)
	}
	for _, file := range files {
		examples.WriteString(read(t, file))
	}
	for page, from := range map[string]string{
		"../../README.md": "", "../../docs/tutorial.md": "", "../../docs/gomlx.md": "\n## A step of your own\n",
	} {
		_, text, _ := strings.Cut(read(t, page), from)
		blocks := goBlock.FindAllStringSubmatch(text, -1)
		if len(blocks) == 0 {
			t.Errorf("%s contains no Go program", page)
		}
		for _, block := range blocks {
			if !strings.Contains(examples.String(), block[1]) {
				t.Errorf("%s contains a program that is not an example: copy it from examples/:\n%s", page, block[1])
			}
		}
	}
}

var goBlock = regexp.MustCompile("(?s)```go\n(.*?)```")

var link = regexp.MustCompile(`\[[^\[\]\n]+\]\(([^)#\s]+)\)`)

// TestLinksLeadSomewhere checks that every relative link of a page names a file of the project.
func TestLinksLeadSomewhere(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("pages: %v, %v", pages, err)
	}
	top, _ := filepath.Glob("../../*.md")
	for _, page := range append(pages, top...) {
		for _, m := range link.FindAllStringSubmatch(read(t, page), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", page, m[1], err)
			}
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
