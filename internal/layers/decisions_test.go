package layers

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var decision = regexp.MustCompile("(?m)^\\| ([^|]+) \\| \\[([^]]+)\\]\\(([^)]+)\\), `([^`]+)` \\|$")

// TestDecisions checks the table of ARCHITECTURE.md that names the file and the function for each decision: all
// questions are there, and each function is declared in its file.
func TestDecisions(t *testing.T) {
	_, text, _ := strings.Cut(read(t, "../../ARCHITECTURE.md"), "\n## Where it is decided\n")
	text, _, _ = strings.Cut(text, "\n## ")
	found := map[string]bool{}
	for _, row := range decision.FindAllStringSubmatch(text, -1) {
		question, title, path, function := row[1], row[2], row[3], row[4]
		found[question] = true
		if title != path {
			t.Errorf("%q: the link to %s is named %s", question, path, title)
		}
		if !declares(t, path, function) {
			t.Errorf("%q: %s declares no function %s: name the one that decides now", question, path, function)
		}
	}
	for _, question := range []string{
		"which worker is lost", "which bucket is reduced first", "what a snapshot holds", "how a rank waits",
		"what the launcher does next",
	} {
		if !found[question] {
			t.Errorf("ARCHITECTURE.md has no row that says %q", question)
		}
	}
}

// declares reports whether a file declares a function, or a method as Type.Method.
func declares(t *testing.T, path, function string) bool {
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join("../..", path), nil, 0)
	if err != nil {
		t.Error(err)
		return false
	}
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		name := f.Name.Name
		if f.Recv != nil {
			name = strings.TrimLeft(types.ExprString(f.Recv.List[0].Type), "*") + "." + name
		}
		if name == function {
			return true
		}
	}
	return false
}
