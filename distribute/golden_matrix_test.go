package distribute_test

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// variant is another way to carry out the reductions of a case.
type variant struct {
	kind  string // of the CrossDeviceOps; empty: the strategy's own collectives
	packs string // its num_packs
	bytes int    // Options.BytesPerPack
}

// make returns the variant's operations. A case that calls CrossDeviceOps without a strategy gets CollectiveAllReduce
// if the variant has no kind.
func (v *variant) make(g *goldenRun, devices []string) (distribute.CrossDeviceOps, error) {
	kind := v.kind
	if kind == "" {
		if !strings.HasPrefix(g.c.Op, "cross_device_") {
			return nil, nil
		}
		kind = "CollectiveAllReduce"
	}
	spec := map[string]any{"type": kind}
	if v.packs != "" {
		spec["num_packs"] = json.Number(v.packs)
	}
	return g.crossDeviceOps(spec, devices)
}

func variants() []variant {
	var out []variant
	for _, bytes := range []int{0, 1, 3, 20, distribute.OnePack} {
		out = append(out, variant{bytes: bytes}, variant{kind: "CollectiveAllReduce", bytes: bytes})
	}
	for _, packs := range []string{"0", "1", "3", "8"} {
		out = append(out, variant{kind: "HierarchicalCopyAllReduce", packs: packs},
			variant{kind: "NcclAllReduce", packs: packs})
	}
	return append(out, variant{kind: "ReductionToOneDevice"}, variant{kind: "ReductionToOneDevice", bytes: 3})
}

// matrixOps lists the operations that use CrossDeviceOps.
var matrixOps = []string{
	"reduce", "reduce_to", "batch_reduce_to", "all_reduce", "all_gather", "gather", "all_reduce_gradient",
	"all_gather_gradient",
	"cross_device_reduce", "cross_device_batch_reduce", "train_loop", "var_program", "run",
}

// TestGoldenMatrix: every case that applies has the same answer, bit for bit, under every kind of
// CrossDeviceOps and with every size of packs. TestGolden compares it with TensorFlow's.
func TestGoldenMatrix(t *testing.T) {
	files := goldenFiles
	if another := os.Getenv("LOCKSTEP_GOLDEN"); another != "" {
		files = []string{another}
	}
	ran := 0
	if testing.Short() {
		t.Log("-short: a third of the cases")
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		cases, err := parseGolden(text)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, c := range cases {
			direct := strings.HasPrefix(c.Op, "cross_device_")
			if !slices.Contains(matrixOps, c.Op) || !direct && c.Strategy["type"] != "MirroredStrategy" {
				continue
			}
			if ran++; testing.Short() && ran%3 != 0 {
				continue // TestGolden runs them all, in one variant
			}
			t.Run(c.ID, func(t *testing.T) { testVariants(t, c) })
		}
	}
	if ran == 0 && os.Getenv("LOCKSTEP_GOLDEN") == "" {
		t.Error("no case applies")
	}
}

func testVariants(t *testing.T, c *goldenCase) {
	first := ""
	for i, v := range variants() {
		answer, err := goldenOps[c.Op](&goldenRun{T: t, c: c, instead: &v})
		got := "error: " + kindsOf(err)
		if err == nil {
			got = bitsOf(answer)
		}
		switch {
		case i == 0:
			first = got
		case got != first:
			t.Fatalf("%+v gives\n%s (%v), want as %+v\n%s", v, got, err, variants()[0], first)
		}
	}
}

// kindsOf names the kinds that an error matches.
func kindsOf(err error) string {
	var kinds []string
	for _, k := range []error{
		distribute.ErrInvalid, distribute.ErrMismatch, distribute.ErrTimeout, distribute.ErrDesync, distribute.ErrPeerLost,
		distribute.ErrBusy,
		distribute.ErrAborted, distribute.ErrClosed, distribute.ErrContext, distribute.ErrUnsupported, errNotInGo,
	} {
		if errors.Is(err, k) {
			kinds = append(kinds, k.Error())
		}
	}
	return strings.Join(kinds, ", ")
}

// bitsOf returns a text of a value; two texts are equal only if all bits are.
func bitsOf(v any) string {
	switch v := v.(type) {
	case *tensor.Tensor:
		if v.DType() == tensor.String {
			return fmt.Sprintf("string%v%q", v.Shape(), v.StringData())
		}
		return fmt.Sprintf("%v%v@%d:%s", v.DType(), v.Shape(), v.Memory().Device, hex.EncodeToString(v.Memory().HostBytes()))
	case *tensor.IndexedSlices:
		dense := ""
		if v.DenseShape != nil {
			dense = bitsOf(v.DenseShape)
		}
		return "slices(" + bitsOf(v.Values) + " " + bitsOf(v.Indices) + " " + dense + ")"
	case *distribute.Components:
		return "per replica" + bitsOf(v.Values())
	case *distribute.Mirrored:
		return "mirrored" + bitsOf(v.Values)
	case tensor.Tuple:
		return "tuple" + bitsOf([]any(v))
	case []any:
		parts := make([]string, len(v))
		for i, x := range v {
			parts[i] = bitsOf(x)
		}
		return "[" + strings.Join(parts, "\n ") + "]"
	case map[string]any:
		parts := []string{}
		for _, k := range slices.Sorted(maps.Keys(v)) {
			parts = append(parts, k+": "+bitsOf(v[k]))
		}
		return "{" + strings.Join(parts, "\n ") + "}"
	case stepAnswer:
		if v.err != nil {
			return "error: " + kindsOf(v.err)
		}
		return bitsOf(v.result)
	case float64:
		return fmt.Sprintf("float64:%x", math.Float64bits(v))
	}
	return fmt.Sprintf("%T:%v", v, v)
}
