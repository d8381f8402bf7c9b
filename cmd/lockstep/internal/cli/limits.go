package cli

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// limited is a flag's value that refuses what the flag does not take.
type limited struct {
	pflag.Value

	// refuse returns the values that the flag takes, for the error of another text; "": the flag takes it.
	refuse func(text string) (want string)
}

// Set implements pflag.Value.
func (l limited) Set(text string) error {
	if err := l.Value.Set(text); err != nil {
		return err
	}
	if want := l.refuse(text); want != "" {
		return &limitError{want}
	}
	return nil
}

// limitError is the error of a value that a flag does not take; [ExplainFlag] adds the flag.
type limitError struct{ want string }

func (e *limitError) Error() string { return "want " + e.want }

// ChoiceVar defines a flag that takes one of some texts, which a shell completes. The usage is that list if it is "".
func ChoiceVar(f *pflag.FlagSet, p *string, name, value, usage string, choices ...string) {
	if usage == "" {
		usage = OneOf(choices)
	}
	f.StringVar(p, name, value, usage)
	Suggest(f, name, choices...)
	flag := f.Lookup(name)
	flag.Value = limited{flag.Value, func(text string) string {
		if slices.Contains(choices, text) {
			return ""
		}
		return OneOf(choices)
	}}
}

// Limit makes flags refuse numbers, sizes or times outside of an interval in mathematical notation: "[1,256]",
// "(0,1)". A missing end sets no bound: "[100ms,)". Text behind the interval follows it in the error. A default
// may be outside of the interval.
func Limit(f *pflag.FlagSet, interval string, names ...string) {
	for _, name := range names {
		flag := f.Lookup(name)
		flag.Value = limited{flag.Value, newInterval(interval, flag.Value.Type()).refuse}
	}
}

// interval is a range of the values of a flag.
type interval struct {
	kind              string // of the flag
	least, most       float64
	openLow, openHigh bool   // without the end itself
	want              string // describes it
}

// newInterval parses an interval of values of a kind of flag.
func newInterval(text, kind string) *interval {
	end := strings.IndexAny(text, ")]")
	i := &interval{kind: kind, least: math.Inf(-1), most: math.Inf(1), openLow: text[0] == '(', openHigh: text[end] == ')'}
	low, high, _ := strings.Cut(text[1:end], ",")
	for end, at := range map[string]*float64{low: &i.least, high: &i.most} {
		var err error
		if end == "" {
			continue
		}
		if *at, err = numberOf(end, kind); err != nil {
			panic("cli: the interval " + text + ": " + err.Error())
		}
	}
	if n, err := strconv.Atoi(high); err == nil {
		high = Grouped(n)
	}
	switch {
	case !i.openLow && !i.openHigh:
		i.want = low + " to " + high
	case i.openLow && i.openHigh && high != "":
		i.want = "a number between " + low + " and " + high
	case i.openLow && i.least == 0 && high == "" && kind == "float64":
		i.want = "a positive number"
	case i.openLow:
		i.want = "more than " + low
	case high == "":
		i.want = "at least " + low
	default:
		i.want = "at least " + low + " and less than " + high
	}
	if i.openLow && !i.openHigh {
		i.want += " and at most " + high
	}
	i.want += text[end+1:]
	return i
}

// refuse returns the description of the interval for a value outside of it.
func (i *interval) refuse(text string) (want string) {
	x, err := numberOf(text, i.kind)
	switch {
	case err != nil || math.IsNaN(x) || math.IsInf(x, 0):
		return "a finite number"
	case x < i.least || x > i.most || i.openLow && x == i.least || i.openHigh && x == i.most:
		return i.want
	}
	return ""
}

// numberOf returns the number that a text means for a kind of flag.
func numberOf(text, kind string) (float64, error) {
	switch kind {
	case "duration":
		d, err := time.ParseDuration(text)
		return float64(d), err
	case "size":
		n, err := ParseBytes(text)
		return float64(n), err
	}
	return strconv.ParseFloat(text, 64)
}

// suggestions is the annotation of flags with the values that a shell suggests.
const suggestions = "suggestions"

// Suggest makes a shell complete the value of a flag.
func Suggest(f *pflag.FlagSet, name string, values ...string) {
	if err := f.SetAnnotation(name, suggestions, values); err != nil {
		panic("cli: " + err.Error()) // the flag is not defined
	}
}

// CompleteFlags registers the values that [Suggest] has for the flags of a command and its subcommands.
func CompleteFlags(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if values := f.Annotations[suggestions]; values != nil {
			// fails only if the flag already has a function
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
		}
	})
	for _, c := range cmd.Commands() {
		CompleteFlags(c)
	}
}
