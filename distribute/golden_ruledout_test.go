package distribute_test

import (
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"strings"
	"sync"
	"testing"
)

// ruledOut lists the scenarios that cannot be written in Go, with a program that tries.
var ruledOut = map[string]struct {
	reason string
	code   string // in a function with a ctx, a strategy s and a value v; it does not compile
	says   string // what the compiler says of it
}{
	"run_args_not_sequence": {
		"arguments are the function's own, not a sequence",
		`distribute.Run(ctx, s, func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) { return x, nil }, v)`, "cannot use",
	},
	"reduce_missing_axis": {"the options, with the axis, are a parameter", `s.Reduce(ctx, distribute.Sum, v)`, "not enough arguments"},
	"reduce_to_list_destinations": {
		"a destination is not a list",
		`s.ReduceTo(ctx, distribute.Sum, v, []string{"CPU:0"})`, "does not implement",
	},
	"update_non_variable": {"what is updated is a variable", `s.Update(ctx, v, nil)`, "cannot use v"},
	"handle_outside_replica": {
		"a variable has no handle; its components' values are read and written in a context",
		`var x *distribute.Variable; _ = x.Handle`, "undefined",
	},
	"cache_variable_reads_nested": {
		"reads of variables cost nothing that could be cached, so there is no such scope",
		`_ = distribute.CacheVariableReads`, "undefined",
	},
	"merge_call_in_nested_function": {
		"steps are Go functions and not traced into graphs, so a merge call may be made in any function that a step calls",
		`_ = distribute.Function`, "undefined",
	},
	"scope_exit_wrong_order_creator": {
		"a scope is a context, which ends with the function that has it",
		`s.Scope(ctx).Exit()`, "undefined",
	},
	"copy_strategy": {
		"a strategy is used by its pointer; a copy of what that points to is refused by go vet, which knows its locks, and of no use: its fields are not exported",
		`t := *s; t.devices = nil`, "undefined",
	},
}

// fromSource imports packages of this module, and all that they import, from source.
var fromSource = sync.OnceValue(func() types.Importer { return importer.ForCompiler(token.NewFileSet(), "source", nil) })

// TestRuledOut compiles what [ruledOut] says does not compile.
func TestRuledOut(t *testing.T) {
	if testing.Short() {
		t.Skip("type-checks the package and all that it imports from source: a few seconds")
	}
	fset, from := token.NewFileSet(), fromSource()
	check := func(code string) error {
		src := fmt.Sprintf("package p\nimport (\"context\"; \"github.com/lockstep-ml/lockstep/distribute\")\nfunc f(ctx context.Context, s *distribute.Strategy, v distribute.Value) {\n%s\n}\nvar _ distribute.Value", code)
		file, err := parser.ParseFile(fset, "p.go", src, 0)
		if err != nil {
			return err
		}
		_, err = (&types.Config{Importer: from}).Check("p", fset, []*ast.File{file}, nil)
		return err
	}
	if err := check(`s.Reduce(ctx, distribute.Sum, v, distribute.ReduceOptions{})`); err != nil {
		t.Fatalf("what must compile does not: %v", err)
	}
	for name, c := range ruledOut {
		if err := check(c.code); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %s: got %v, want an error that says %q", name, c.code, err, c.says)
		}
		if _, ok := scenarios[name]; ok {
			t.Errorf("%s is both a scenario and ruled out", name)
		}
	}
}
