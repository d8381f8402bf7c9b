package cli

import (
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestLimits sets flags to values inside and outside of what they take.
func TestLimits(t *testing.T) {
	for _, c := range []struct{ kind, interval, text, want string }{
		{"int", "[1,10000]", "10000", ""},
		{"int", "[1,10000]", "0", "--x 0: want 1 to 10,000"},
		{"int", "[1,10000]: use fewer", "10001", "--x 10001: want 1 to 10,000: use fewer"},
		{"int", "[1,)", "x", "--x x: want a whole number"},
		{"int", "[0,)", "-1", "--x -1: want at least 0"},
		{"float", "(0,)", "0", "--x 0: want a positive number"},
		{"float", "(0,1]", "1", ""},
		{"float", "(0,1]", "1.5", "--x 1.5: want more than 0 and at most 1"},
		{"float", "(0,1)", "1", "--x 1: want a number between 0 and 1"},
		{"float", "[0,1)", "1", "--x 1: want at least 0 and less than 1"},
		{"float", "[0,1)", "NaN", "--x NaN: want a finite number"},
		{"duration", "[1s,)", "999ms", "--x 999ms: want at least 1s"},
		{"duration", "(0s,), such as 30s", "0s", "--x 0s: want more than 0s, such as 30s"},
		{"size", "[1B,1GiB]", "1GiB", ""},
		{"size", "[1B,1GiB]", "2GiB", "--x 2GiB: want 1B to 1GiB"},
		{"choice", "", "b", ""},
		{"choice", "", "d", "--x d: want a, b or c"},
	} {
		cmd := &cobra.Command{}
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		switch c.kind {
		case "int":
			f.Int("x", 0, "")
		case "float":
			f.Float64("x", 0, "")
		case "duration":
			f.Duration("x", 0, "")
		case "size":
			f.Var(new(BytesValue), "x", "")
		case "choice":
			ChoiceVar(f, new(string), "x", "", "", "a", "b", "c")
		}
		if c.interval != "" {
			Limit(f, c.interval, "x")
		}
		got := ""
		if err := f.Parse([]string{"--x=" + c.text}); err != nil {
			got = ExplainFlag(cmd, err).Error()
		}
		if got != c.want {
			t.Errorf("%s in %s: got %q, want %q", c.text, c.interval, got, c.want)
		}
	}
}
