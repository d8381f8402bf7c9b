package plan

import (
	"strings"
	"testing"
)

// TestParseOp: an operation has the same name with underscores, with hyphens and without either.
func TestParseOp(t *testing.T) {
	for o := AllReduce; o <= Recv; o++ {
		for _, name := range []string{
			o.String(), strings.ReplaceAll(o.String(), "_", "-"), strings.ReplaceAll(o.String(), "_", ""),
			strings.ToUpper(o.String()),
		} {
			if got, err := ParseOp(name); err != nil || got != o {
				t.Errorf("ParseOp(%q) = %v, %v; want %v", name, got, err, o)
			}
		}
	}
	for _, name := range []string{"", "all", "allreduc", "op(0)"} {
		if got, err := ParseOp(name); err == nil || !strings.Contains(err.Error(), "is not an operation") {
			t.Errorf("ParseOp(%q) = %v, %v; want an error", name, got, err)
		}
	}
}
