package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ruledOut lists the scenarios that cannot be written in Go, each with the test that replaces it: the
// compiler rejects the mistake, or the API that causes it in TensorFlow does not exist.
var ruledOut = map[string]struct {
	reason  string
	code    string // in a function with a ctx, a strategy s and a value v: the mistake, which must not compile
	message string // in the compiler's message
	instead func(ctx context.Context, s *distribute.Strategy) error
}{
	"run_args_not_sequence": {
		reason:  "arguments are the function's own, not a sequence",
		code:    `distribute.Run(ctx, s, func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) { return x, nil }, v)`,
		message: "PerReplica",
	},
	"reduce_missing_axis": {
		reason: "the options, with the axis, are a parameter",
		code:   `s.Extended().Reduce(ctx, distribute.Sum, v)`, message: "not enough arguments",
	},
	"update_non_variable": {
		reason: "what is updated is a variable",
		code:   `s.Extended().Update(ctx, v, nil)`, message: "cannot use v",
	},
	"handle_outside_replica": {
		reason: "a variable has no handle; its components' values are read and written in a context, outside of replicas too",
		instead: func(ctx context.Context, s *distribute.Strategy) error {
			return onVariable(ctx, s, func(v *distribute.Variable, c *distribute.CrossReplica) error {
				return reads(v, c, 1)
			})
		},
	},
	"cache_variable_reads_nested": {
		reason: "reads of variables cost nothing that could be cached, so there is no such scope: every read sees the last " +
			"assignment",
		instead: func(ctx context.Context, s *distribute.Strategy) error {
			return onVariable(ctx, s, func(v *distribute.Variable, c *distribute.CrossReplica) error {
				for _, x := range []float64{0, 1, 2} {
					if err := v.Assign(c, scalar(x)); err != nil {
						return err
					}
					if err := reads(v, c, x); err != nil {
						return err
					}
				}
				return nil
			})
		},
	},
	"merge_call_in_nested_function": {
		reason: "steps are Go functions and not traced into graphs, so a merge call may be made in any function that a " +
			"step calls",
		instead: func(ctx context.Context, s *distribute.Strategy) error {
			var merged atomic.Int32
			_, err := inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
				nested := func() (distribute.Value, error) {
					return distribute.MergeNests(ctx, r,
						func(context.Context, *distribute.CrossReplica, ...distribute.Value) (distribute.Value, error) {
							merged.Add(1)
							return nil, nil
						})
				}
				return nested()
			})
			if n := merged.Load(); err == nil && n != 1 {
				err = fmt.Errorf("the merge function was called %d times, want once for both replicas", n)
			}
			return err
		},
	},
	"scope_exit_wrong_order_creator": {
		reason: "a scope is a context, which ends with the function that has it: it changes no other",
		instead: func(ctx context.Context, s *distribute.Strategy) error {
			before := distribute.CurrentStrategy(ctx)
			inner := s.Scope(ctx)
			if distribute.CurrentStrategy(inner) != s || distribute.CurrentStrategy(ctx) != before || before == s {
				return errors.New("the scope is not its own context's alone")
			}
			return nil
		},
	},
	"copy_strategy": {
		reason: "a strategy is used by its pointer; a copy of what that points to is refused by go vet, which knows its " +
			"locks, and of no use: its fields are not exported",
		instead: func(context.Context, *distribute.Strategy) error {
			locks := false
			for f := range reflect.TypeFor[distribute.Strategy]().Fields() {
				if f.IsExported() {
					return fmt.Errorf("the field %s is exported", f.Name)
				}
				locks = locks || f.Type.Kind() == reflect.Struct &&
					reflect.PointerTo(f.Type).Implements(reflect.TypeFor[sync.Locker]())
			}
			if !locks {
				return errors.New("it has no lock by which go vet would know that it must not be copied")
			}
			return nil
		},
	},
}

// onVariable calls f with a new variable of the value 1, outside of replicas.
func onVariable(
	ctx context.Context, s *distribute.Strategy, f func(*distribute.Variable, *distribute.CrossReplica) error,
) error {
	v, err := newVariable(ctx, s, 1, distribute.VariableConfig{})
	if err != nil {
		return err
	}
	c, err := s.Cross(s.Scope(ctx))
	if err != nil {
		return err
	}
	return f(v, c)
}

// reads checks that reading a variable returns x.
func reads(v *distribute.Variable, c *distribute.CrossReplica, x float64) error {
	got, err := v.Read(c)
	if err != nil {
		return err
	}
	for _, component := range v.Values() {
		if t, ok := component.(*tensor.Tensor); !ok || t.Float64s()[0] != x {
			return fmt.Errorf("a component is %v, want %v", component, x)
		}
	}
	if got.Float64s()[0] != x {
		return fmt.Errorf("it reads as %v, want %v", got, x)
	}
	return nil
}

// compiled imports this package, those of the documentation's tables, and what they import, as the go command compiled
// them.
var compiled = sync.OnceValue(func() types.Importer {
	out, err := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".", "../train/...",
		"../cluster/...", "../engine/gomlx").Output()
	files := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		files[path] = file
	}
	return importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		if err != nil {
			return nil, fmt.Errorf("go list -export: %w", err)
		}
		return os.Open(files[path])
	})
})

// TestRuledOut compiles the programs of [ruledOut], which must not compile.
func TestRuledOut(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it may have to compile the package again, without the flags of the test")
	}
	fset, from := token.NewFileSet(), compiled()
	check := func(code string) error {
		src := fmt.Sprintf("package p\nimport (\"context\"; \"github.com/lockstep-ml/lockstep/distribute\")\nfunc f(ctx "+
			"context.Context, s *distribute.Strategy, v distribute.Value) {\n%s\n}\nvar _ distribute.Value", code)
		file, err := parser.ParseFile(fset, "p.go", src, 0)
		if err != nil {
			return err
		}
		_, err = (&types.Config{Importer: from}).Check("p", fset, []*ast.File{file}, nil)
		return err
	}
	if err := check(`s.Extended().Reduce(ctx, distribute.Sum, v, distribute.ReduceOptions{})`); err != nil {
		t.Fatalf("a valid program does not compile: %v", err)
	}
	for name, c := range ruledOut {
		if (c.code == "") == (c.instead == nil) {
			t.Errorf("%s: want either a program that does not compile, or a replacement", name)
		}
		if c.code == "" {
			continue
		}
		if err := check(c.code); err == nil || !strings.Contains(err.Error(), c.message) ||
			strings.Contains(err.Error(), "undefined") {
			t.Errorf("%s: %s: got %v, want an error with %q, of names that exist", name, c.code, err, c.message)
		}
	}
}

// TestInsteadOfRuledOut tests the APIs that replace those of [ruledOut].
func TestInsteadOfRuledOut(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{LogicalCPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for name, c := range ruledOut {
		if _, ok := scenarios[name]; ok {
			t.Errorf("%s is both a scenario and ruled out", name)
		}
		if c.instead == nil {
			continue
		}
		if err := c.instead(t.Context(), s); err != nil {
			t.Errorf("%s: %s: %v", name, c.reason, err)
		}
	}
}
