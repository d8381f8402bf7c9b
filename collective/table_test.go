package collective_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// TestTableOfTheEnvironment checks that the table of LOCKSTEP_TABLE is read, and that the error of a missing file names
// the variable and the path.
func TestTableOfTheEnvironment(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table.json")
	t.Setenv("LOCKSTEP_TABLE", path)
	if _, err := collective.Open(mem.New(1), collective.Config{}); err == nil ||
		!strings.Contains(err.Error(), "LOCKSTEP_TABLE") || !strings.Contains(err.Error(), path) {
		t.Errorf("a missing table: %v", err)
	}
	if err := chooser.Default().Save(path); err != nil {
		t.Fatal(err)
	}
	g, err := collective.Open(mem.New(1), collective.Config{})
	if err != nil {
		t.Fatal(err)
	}
	shut(t, g)
}
