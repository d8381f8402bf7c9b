package layers

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestReadmeShowsTheExample: the program in the README is the one in examples/mirrored, which its own test runs.
func TestReadmeShowsTheExample(t *testing.T) {
	source := read(t, "../../examples/mirrored/main.go")
	_, program, found := strings.Cut(source, "\n)\n\n")
	if !found {
		t.Fatal("examples/mirrored/main.go has no import block")
	}
	if !strings.Contains(read(t, "../../README.md"), "```go\n"+strings.TrimSpace(program)+"\n```") {
		t.Error("README.md does not show what stands behind the imports of examples/mirrored/main.go: copy it there")
	}
}

var link = regexp.MustCompile(`\[[^\[\]\n]+\]\(([^)#\s]+)\)`)

// TestLinksLeadSomewhere: every relative link of a page names a file of the project.
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
