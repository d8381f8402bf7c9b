package root

import (
	"os"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// screens is how many screens of screenLines lines the help of lockstep train may fill.
const (
	screens     = 3
	screenLines = 50
)

// TestHelpOfTrain: the help of lockstep train fits on a few screens, and docs/flags.md has each flag, with a star if
// the help leaves it out.
func TestHelpOfTrain(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/flags.md")
	if err != nil {
		t.Fatal(err)
	}
	root := New()
	var help strings.Builder
	root.SetOut(&help)
	root.SetArgs([]string{"train", "--help"})
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(help.String(), "\n"); n > screens*screenLines {
		t.Errorf("the help of lockstep train has %d lines, want at most %d", n, screens*screenLines)
	}
	train, _, err := root.Find([]string{"train"})
	if err != nil {
		t.Fatal(err)
	}
	train.Flags().VisitAll(func(f *pflag.Flag) {
		cell := "| `--" + f.Name
		if kind, _ := pflag.UnquoteUsage(f); kind != "" {
			cell += " " + kind
		}
		if cell += "`"; f.Hidden {
			cell += "*"
		}
		if f.Name != "help" && !strings.Contains(string(page), "\n"+cell+" |") {
			t.Errorf("docs/flags.md has no row %s |", cell)
		}
	})
}
