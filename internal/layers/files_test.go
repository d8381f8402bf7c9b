package layers

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fileLayers lists the files of distribute by layer, the lowest first. A file uses no name of a file in a higher layer,
// nor of a file to its right in its own layer.
var fileLayers = []struct{ layer, files string }{
	{"errors, devices, options", "errors device_engine options input stats"},
	{"values", "values destination operand sparse nests"},
	{"reductions", "group crossdevice gatherer onedevice hierarchical scalars reducers " +
		"collectiveops collectiveops_exchange collectiveops_reduce"},
	{"strategies", "strategy properties implementation separate"},
	{"contexts", "context component crossreplica workervalues replica handle workers open default scope run merge"},
	{"reductions of a strategy and in a step", "reduce gather calls packs allreduce_sparse allreduce bucket alltoall " +
		"allgather gradient"},
	{"variables", "variable variable_new assign scatter update save extended"},
	{"datasets", "dataset_steps dataset_workers dataset"},
	{"constructors", "strategies multiworker_config multiworker reform"},
}

// upward lists the uses against the layers: fields whose types are in a higher layer.
var upward = []string{
	"strategy.go -> workers.go", "context.go -> replica.go", "replica.go -> handle.go",
	"context.go -> component.go", "component.go -> variable.go",
}

// TestFilesUseLowerFiles checks that the files of distribute are in layers.
func TestFilesUseLowerFiles(t *testing.T) {
	height := map[string]int{"doc.go": 0}
	for _, l := range fileLayers {
		for _, f := range strings.Fields(l.files) {
			height[f+".go"] = len(height)
		}
	}
	used := usesBetweenFiles(t, filepath.Join("..", "..", "distribute"))
	for file := range height {
		if _, ok := used[file]; !ok {
			t.Errorf("distribute/%s is in a layer, but does not exist", file)
		}
	}
	for _, file := range slices.Sorted(maps.Keys(used)) {
		if _, ok := height[file]; !ok {
			t.Errorf("distribute/%s is in no layer of fileLayers: add it", file)
			continue
		}
		for other, name := range used[file] {
			if height[other] > height[file] && !slices.Contains(upward, file+" -> "+other) {
				t.Errorf("distribute/%s uses %s of %s, which is in a higher layer: move one of them", file, name, other)
			}
		}
	}
	for _, use := range upward {
		file, other, _ := strings.Cut(use, " -> ")
		if used[file][other] == "" {
			t.Errorf("%s: this use has gone: remove it from upward", use)
		}
	}
}

// usesBetweenFiles returns which other files of a package each file uses, and one name of each.
func usesBetweenFiles(t *testing.T, folder string) map[string]map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no Go files in %s: %v", folder, err)
	}
	set := token.NewFileSet()
	var files []*ast.File
	used := map[string]map[string]string{}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
		used[filepath.Base(path)] = map[string]string{}
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	// Imports are not loaded: the errors that follow concern names of other packages.
	conf := types.Config{Importer: noImports{}, Error: func(error) {}}
	own, _ := conf.Check(folder, set, files, info)
	file := func(at token.Pos) string { return filepath.Base(set.Position(at).Filename) }
	for id, object := range info.Uses {
		if object.Pkg() == own && object.Pos().IsValid() && file(object.Pos()) != file(id.Pos()) {
			used[file(id.Pos())][file(object.Pos())] = object.Name()
		}
	}
	return used
}

// noImports loads no package.
type noImports struct{}

func (noImports) Import(path string) (*types.Package, error) {
	return nil, fmt.Errorf("%s is not loaded", path)
}

// filesMax is the largest number of Go files, tests among them, in a folder of the command.
const filesMax = 20

// TestFoldersOfTheCommandAreSmall counts the files of the command's packages.
func TestFoldersOfTheCommandAreSmall(t *testing.T) {
	files := map[string]int{}
	walk(t, ".go", func(path, _ string) { files[filepath.Dir(path)]++ })
	for folder, n := range files {
		if strings.HasPrefix(filepath.ToSlash(folder), "cmd/lockstep") && n > filesMax {
			t.Errorf("%s has %d Go files, want at most %d: divide the package", folder, n, filesMax)
		}
	}
}
