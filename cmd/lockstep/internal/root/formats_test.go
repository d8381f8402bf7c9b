package root

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/collective/bench"
)

// TestJSONEverywhere wants every command with --format to offer json, and docs/json.md to describe its fields.
func TestJSONEverywhere(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/json.md")
	if err != nil {
		t.Fatal(err)
	}
	collectives := slices.Collect(func(yield func(string) bool) {
		for name := range bench.Ops {
			if !yield("lockstep bench " + name) {
				return
			}
		}
	})
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		if f := c.Flags().Lookup("format"); f != nil {
			if !strings.Contains(f.Usage, "json") {
				t.Errorf("%s --format: %s: no json", c.CommandPath(), f.Usage)
			}
			if !slices.Contains(collectives, c.CommandPath()) &&
				!strings.Contains(string(page), "`"+strings.TrimPrefix(c.CommandPath(), "lockstep ")) {
				t.Errorf("docs/json.md does not describe %s", c.CommandPath())
			}
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(New())
}
