package cli

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// Bounds of all numeric flags, so that sums do not overflow. Most flags have closer bounds.
const (
	NumberMax   = int64(1_000_000_000_000)
	durationMax = 365 * 24 * time.Hour
)

// unbounded are the flags that take any number.
var unbounded = []string{"seed"}

// CheckNumbers validates the given numbers against the bounds of all flags.
func CheckNumbers(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		text := f.Value.String()
		wrong := ""
		switch f.Value.Type() {
		case "int", "int64":
			if n, e := strconv.ParseInt(text, 10, 64); e != nil || n < -NumberMax || n > NumberMax {
				wrong = fmt.Sprintf("a number up to %d", NumberMax)
			}
			if slices.Contains(unbounded, f.Name) {
				wrong = ""
			}
		case "float64":
			if x, e := strconv.ParseFloat(text, 64); e != nil || math.IsNaN(x) || math.IsInf(x, 0) {
				wrong = "a finite number"
			}
		case "duration":
			if d, e := time.ParseDuration(text); e != nil || d < -durationMax || d > durationMax {
				wrong = fmt.Sprintf("a time up to %v", durationMax)
			}
		}
		if wrong != "" && err == nil {
			err = Usagef("--%s %s: want %s", f.Name, text, wrong)
		}
	})
	return err
}

// ExplainFlag explains an error of a flag: the values that it takes, or the flag that was probably meant.
func ExplainFlag(cmd *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return suggestFlag(cmd, err)
	}
	f := invalid.GetFlag()
	want := map[string]string{
		"int": "a whole number", "int64": "a whole number", "float64": "a number such as 0.5",
		"intSlice": "whole numbers with commas between them, such as 512,512",
		"duration": "a time such as 30s or 5m", "bool": "true or false",
	}[f.Value.Type()]
	var limit *limitError
	switch number := (*strconv.NumError)(nil); {
	case errors.As(err, &limit):
		want = limit.want
	case want == "": // a type of this package, whose error names the valid values
		return fmt.Errorf("--%s: %w", f.Name, invalid.Unwrap())
	case errors.As(err, &number) && errors.Is(number.Err, strconv.ErrRange):
		want += fmt.Sprintf(" up to %d", NumberMax)
	}
	return fmt.Errorf("--%s %s: want %s", f.Name, invalid.GetValue(), want)
}

// NoArguments refuses arguments that are not flags.
func NoArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return Usagef("%q: %s takes flags only", strings.Join(args, " "), cmd.CommandPath())
	}
	return nil
}

// StrictHelp makes help for an unknown command an error.
func StrictHelp(root *cobra.Command) {
	for _, c := range root.Commands() {
		if c.Name() != "help" {
			continue
		}
		c.Run = nil
		c.RunE = func(_ *cobra.Command, args []string) error {
			about, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return Usagef("help %s: no such command", strings.Join(args, " "))
			}
			about.InitDefaultHelpFlag()
			about.InitDefaultVersionFlag()
			return about.Help()
		}
	}
}

// BindVar defines a flag --bind-to of a command that binds who, such as "each worker".
func BindVar(f *pflag.FlagSet, p *string, who string) {
	var names []string
	for _, policy := range affinity.Policies() {
		names = append(names, string(policy))
	}
	ChoiceVar(f, p, "bind-to", string(affinity.Share), "bind "+who+" to CPUs by this `policy`: share (equal parts of the "+
		"cores), core (one core), numa (one NUMA node) or none; with fewer CPUs than processes share and core bind none",
		names...)
}
