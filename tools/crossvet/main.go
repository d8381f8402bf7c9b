// Command crossvet type-checks packages and their tests for other targets and runs go vet's analyzers on them.
//
//	go run -C tools ./crossvet linux/arm64 windows/amd64 linux/386 -- ./transport/... ./collective
//
// Packages are relative to the root of the repository. It finds what go vet with GOOS and GOARCH finds, in a fraction
// of the time: go vet compiles all dependencies for the target, and crossvet reads only their declarations. Without the
// bodies of dependencies, an analyzer knows no printf wrapper outside of the module except the standard library's.
package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/checker"
	"golang.org/x/tools/go/analysis/passes/appends"
	"golang.org/x/tools/go/analysis/passes/asmdecl"
	"golang.org/x/tools/go/analysis/passes/assign"
	"golang.org/x/tools/go/analysis/passes/atomic"
	"golang.org/x/tools/go/analysis/passes/bools"
	"golang.org/x/tools/go/analysis/passes/buildtag"
	"golang.org/x/tools/go/analysis/passes/cgocall"
	"golang.org/x/tools/go/analysis/passes/composite"
	"golang.org/x/tools/go/analysis/passes/copylock"
	"golang.org/x/tools/go/analysis/passes/defers"
	"golang.org/x/tools/go/analysis/passes/directive"
	"golang.org/x/tools/go/analysis/passes/errorsas"
	"golang.org/x/tools/go/analysis/passes/framepointer"
	"golang.org/x/tools/go/analysis/passes/hostport"
	"golang.org/x/tools/go/analysis/passes/httpresponse"
	"golang.org/x/tools/go/analysis/passes/ifaceassert"
	"golang.org/x/tools/go/analysis/passes/loopclosure"
	"golang.org/x/tools/go/analysis/passes/lostcancel"
	"golang.org/x/tools/go/analysis/passes/nilfunc"
	"golang.org/x/tools/go/analysis/passes/printf"
	"golang.org/x/tools/go/analysis/passes/shift"
	"golang.org/x/tools/go/analysis/passes/sigchanyzer"
	"golang.org/x/tools/go/analysis/passes/slog"
	"golang.org/x/tools/go/analysis/passes/stdmethods"
	"golang.org/x/tools/go/analysis/passes/stdversion"
	"golang.org/x/tools/go/analysis/passes/stringintconv"
	"golang.org/x/tools/go/analysis/passes/structtag"
	"golang.org/x/tools/go/analysis/passes/testinggoroutine"
	"golang.org/x/tools/go/analysis/passes/tests"
	"golang.org/x/tools/go/analysis/passes/timeformat"
	"golang.org/x/tools/go/analysis/passes/unmarshal"
	"golang.org/x/tools/go/analysis/passes/unreachable"
	"golang.org/x/tools/go/analysis/passes/unsafeptr"
	"golang.org/x/tools/go/analysis/passes/unusedresult"
	"golang.org/x/tools/go/analysis/passes/waitgroup"
	"golang.org/x/tools/go/packages"
)

// suite is go vet's, in its order.
var suite = []*analysis.Analyzer{
	appends.Analyzer, asmdecl.Analyzer, assign.Analyzer, atomic.Analyzer, bools.Analyzer, buildtag.Analyzer,
	cgocall.Analyzer, composite.Analyzer, copylock.Analyzer, defers.Analyzer, directive.Analyzer, errorsas.Analyzer,
	framepointer.Analyzer, httpresponse.Analyzer, hostport.Analyzer, ifaceassert.Analyzer, loopclosure.Analyzer,
	lostcancel.Analyzer, nilfunc.Analyzer, printf.Analyzer, shift.Analyzer, sigchanyzer.Analyzer, slog.Analyzer,
	stdmethods.Analyzer, stdversion.Analyzer, stringintconv.Analyzer, structtag.Analyzer, tests.Analyzer,
	testinggoroutine.Analyzer, timeformat.Analyzer, unmarshal.Analyzer, unreachable.Analyzer, unsafeptr.Analyzer,
	unusedresult.Analyzer, waitgroup.Analyzer,
}

func main() {
	targets, patterns := os.Args[1:], []string{"./..."}
	if i := slices.Index(targets, "--"); i >= 0 {
		targets, patterns = targets[:i], targets[i+1:]
	}
	if len(targets) == 0 || len(patterns) == 0 {
		fmt.Fprintln(os.Stderr, "usage: crossvet GOOS/GOARCH... [-- PACKAGE...]")
		os.Exit(2)
	}
	failed := false
	for _, target := range targets {
		found, err := vet(os.Stdout, target, patterns)
		if err != nil {
			fmt.Fprintf(os.Stderr, "crossvet: %s: %v\n", target, err)
			os.Exit(1)
		}
		failed = failed || found > 0
	}
	if failed {
		os.Exit(1)
	}
}

// vet prints what is wrong with the packages on a target to w and returns how many lines it printed.
func vet(w io.Writer, target string, patterns []string) (int, error) {
	system, processor, ok := strings.Cut(target, "/")
	if !ok {
		return 0, errors.New("want GOOS/GOARCH, such as linux/arm64")
	}
	root, err := filepath.Abs("..")
	if err != nil {
		return 0, err
	}
	pkgs, err := packages.Load(&packages.Config{
		Mode:  packages.LoadAllSyntax | packages.NeedModule | packages.NeedForTest, // all from source: compiles nothing
		Dir:   root,
		Env:   append(os.Environ(), "GOOS="+system, "GOARCH="+processor, "CGO_ENABLED=0"),
		Tests: true,
		ParseFile: func(files *token.FileSet, name string, text []byte) (*ast.File, error) {
			return parse(files, root, name, text)
		},
	}, patterns...)
	if err != nil {
		return 0, err
	}
	// go test's generated main functions lie outside of the repository.
	pkgs = slices.DeleteFunc(pkgs, func(p *packages.Package) bool { return strings.HasSuffix(p.ID, ".test") })
	// A dependency without bodies does not use all its imports: its errors have no meaning.
	packages.Visit(pkgs, nil, func(p *packages.Package) {
		if p.Module == nil || !p.Module.Main {
			p.Errors, p.TypeErrors = nil, nil
		}
		p.IllTyped = len(p.Errors) > 0
	})
	printed := map[string]bool{} // a file without tests is in two packages: alone, and with the package's tests
	report := func(place token.Position, message string) {
		line := fmt.Sprintf("%s: %s: %s", target, place, message)
		if !printed[line] {
			printed[line] = true
			fmt.Fprintln(w, line)
		}
	}
	for _, p := range pkgs {
		for _, e := range p.Errors {
			report(token.Position{Filename: e.Pos}, e.Msg)
		}
	}
	graph, err := checker.Analyze(suite, pkgs, nil)
	if err != nil {
		return 0, err
	}
	for action := range graph.All() {
		if !action.IsRoot || action.Package.IllTyped {
			continue
		}
		if action.Err != nil {
			return 0, fmt.Errorf("%v: %w", action, action.Err)
		}
		for _, d := range action.Diagnostics {
			report(action.Package.Fset.Position(d.Pos), d.Message)
		}
	}
	return len(printed), nil
}

// parse drops the bodies of functions outside of root.
func parse(files *token.FileSet, root, name string, text []byte) (*ast.File, error) {
	file, err := parser.ParseFile(files, name, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil || strings.HasPrefix(name, root+string(filepath.Separator)) {
		return file, err
	}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			f.Body = nil
		}
	}
	return file, nil
}
