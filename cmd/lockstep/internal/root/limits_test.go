package root

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// limitPackages are the folders of the packages whose fields the page of time limits names.
var limitPackages = map[string]string{
	"collective": "collective", "distribute": "distribute", "train": "train", "worker": "cluster/worker",
	"launch": "cluster/launch", "rendezvous": "cluster/rendezvous", "tcp": "transport/tcp", "doctor": "cluster/doctor",
}

// limitConstants are the constants that hold limits without a flag: a folder, and a pattern of the constant's name.
var limitConstants = map[string][][2]string{
	"stall": {
		{"collective", `(?i)^(default)?stall(default)?$`},
		{"distribute/internal/deadlock", `^stallDefault$`},
	},
	"abandoned replica":         {{"distribute/internal/deadlock", `^graceDefault$`}},
	"abandoned dataset":         {{"train", `^endTimeout$`}},
	"heartbeat timeout":         {{"cluster/worker", `(?i)^(default)?heartbeat(default)?$`}},
	"rendezvous timeout":        {{"cluster/worker", `(?i)^(default)?rendezvous(default)?$`}},
	"expression of a tokenizer": {{"data/tokenizer", `^textMax$`}},
	"collective timeout":        {{"collective", `^defaultTimeout$`}, {"distribute", `^defaultTimeout$`}},
}

// TestTimeLimits compares the table of all time limits in docs/no-hang.md with the code: the defaults of flags, the
// values of constants, and the comments of the fields.
func TestTimeLimits(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/no-hang.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "## All time limits\n")
	table, _, _ = strings.Cut(table, "\n## ")
	rows, constants := 0, 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) != 7 || strings.HasPrefix(line, "|---") || strings.Contains(line, "| limit |") {
			continue
		}
		rows++
		name, value, set := strings.TrimSpace(cells[1]), strings.TrimSpace(cells[2]), cells[5]
		first, _, _ := strings.Cut(value, ";") // the usual one
		limit, err := parseWords(first)
		if err != nil && !strings.Contains(value, "heartbeat timeout") &&
			!strings.Contains(value, "collective timeout") {
			t.Errorf("%s: %v", name, err)
			continue
		}
		checked := 0
		for _, m := range regexp.MustCompile("`lockstep ([a-z]+) --([a-z-]+)`").FindAllStringSubmatch(set, -1) {
			checked++
			cmd, _, err := New().Find([]string{m[1]})
			if err != nil {
				t.Fatal(err)
			}
			if flag := cmd.Flag(m[2]); flag == nil || limit > 0 && flag.DefValue != limit.String() {
				t.Errorf("%s: lockstep %s --%s is %+v, the page has %v", name, m[1], m[2], flag, limit)
			}
		}
		for _, m := range regexp.MustCompile("`([a-z]+)\\.([A-Za-z]+)\\.([A-Za-z]+)`").FindAllStringSubmatch(set, -1) {
			checked++
			comment := fieldComment(t, limitPackages[m[1]], m[2], m[3])
			if limit > 0 && !strings.Contains(comment, "efault "+first) || comment == "" {
				t.Errorf("%s: the comment of %s is %q, the page has %q", name, m[0], comment, value)
			}
		}
		for _, c := range limitConstants[name] {
			checked++
			constants++
			if got := constant(t, c[0], regexp.MustCompile(c[1])); got != limit {
				t.Errorf("%s: the constant %s of %s is %v, the page has %v", name, c[1], c[0], got, limit)
			}
		}
		if checked == 0 {
			t.Errorf("%s: nothing to compare the row with: name a field or a flag, or add its constant to this test", name)
		}
	}
	if rows < 10 || constants != 9 {
		t.Errorf("%d rows and %d constants were compared", rows, constants)
	}
}

// parseWords parses a duration such as "10 minutes".
func parseWords(text string) (time.Duration, error) {
	number, unit, _ := strings.Cut(text, " ")
	return time.ParseDuration(number + strings.TrimSuffix(unit, unit[min(1, len(unit)):]))
}

// parseFolder parses the Go files of a folder of the module.
func parseFolder(t *testing.T, folder string) []*ast.File {
	t.Helper()
	names, err := filepath.Glob(filepath.Join("..", "..", "..", "..", filepath.FromSlash(folder), "*.go"))
	if err != nil || len(names) == 0 {
		t.Fatalf("%s has no Go files: %v", folder, err)
	}
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

// fieldComment returns the comment of a field, on one line.
func fieldComment(t *testing.T, folder, typ, field string) (text string) {
	t.Helper()
	for _, file := range parseFolder(t, folder) {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || spec.Name.Name != typ {
				return true
			}
			for _, f := range spec.Type.(*ast.StructType).Fields.List {
				for _, name := range f.Names {
					if name.Name == field {
						text = strings.Join(strings.Fields(f.Doc.Text()+f.Comment.Text()), " ")
					}
				}
			}
			return false
		})
	}
	return text
}

// constant returns the value of the constant of the form "10 * time.Second" or "time.Second" whose name matches.
func constant(t *testing.T, folder string, name *regexp.Regexp) (value time.Duration) {
	t.Helper()
	units := map[string]time.Duration{"Millisecond": time.Millisecond, "Second": time.Second, "Minute": time.Minute}
	for _, file := range parseFolder(t, folder) {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Names) != 1 || len(spec.Values) != 1 || !name.MatchString(spec.Names[0].Name) {
				return true
			}
			factor := 1
			expression := spec.Values[0]
			if product, ok := expression.(*ast.BinaryExpr); ok {
				literal, _ := product.X.(*ast.BasicLit)
				if literal == nil {
					return true
				}
				factor, _ = strconv.Atoi(literal.Value)
				expression = product.Y
			}
			if unit, ok := expression.(*ast.SelectorExpr); ok {
				value = time.Duration(factor) * units[unit.Sel.Name]
			}
			return true
		})
	}
	return value
}
