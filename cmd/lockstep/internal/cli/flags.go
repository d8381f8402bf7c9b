package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// FlagGroup is a set of flags that the help of a command lists under a separate heading.
type FlagGroup struct {
	Heading string
	Flags   *pflag.FlagSet
}

// GroupFlags makes the help of a command list some of its flags in groups, after the other flags.
func GroupFlags(cmd *cobra.Command, groups ...FlagGroup) {
	cmd.SetUsageFunc(func(c *cobra.Command) error {
		rest := pflag.NewFlagSet("", pflag.ContinueOnError)
		rest.SortFlags = false
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			for _, g := range groups {
				if g.Flags.Lookup(f.Name) != nil {
					return
				}
			}
			rest.AddFlag(f)
		})
		var b strings.Builder
		fmt.Fprintf(&b, "Usage:\n  %s\n\nExamples:\n%s\n", c.UseLine(), c.Example)
		for _, g := range append([]FlagGroup{{"Flags", rest}}, groups...) {
			fmt.Fprintf(&b, "\n%s:\n%s", g.Heading, g.Flags.FlagUsagesWrapped(HelpColumns))
		}
		_, err := fmt.Fprint(c.OutOrStderr(), b.String())
		return err
	})
}

// FileOnly leaves flags out of help texts: they are meant for files of --config, and docs/flags.md lists them.
func FileOnly(f *pflag.FlagSet, names ...string) {
	for _, name := range names {
		f.Lookup(name).Hidden = true
	}
}

// WantCommand is the Args of a command that only has subcommands.
func WantCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	if name := Closest(args[0], names); name != "" {
		return Usagef("unknown command %q for %q: did you mean %s?", args[0], cmd.CommandPath(), name)
	}
	return Usagef("unknown command %q for %q: want one of %s", args[0], cmd.CommandPath(), strings.Join(names, ", "))
}

// KeepOrder makes help list flags in the order of their definitions, which groups related flags.
func KeepOrder(cmd *cobra.Command) {
	cmd.Flags().SortFlags = false
	for _, c := range cmd.Commands() {
		KeepOrder(c)
	}
}

// comparison is the annotation of flags that the workers of a job do not compare by value.
const comparison = "comparison"

// The values of the annotation.
const (
	notCompared = "none"
	ifGiven     = "whether it is given"
)

// NotCompared marks flags that may differ between the workers of a job.
func NotCompared(f *pflag.FlagSet, names ...string) { annotate(f, notCompared, names) }

// ComparedIfGiven marks flags that all workers of a job must have or none. Their values, which are paths, may differ.
func ComparedIfGiven(f *pflag.FlagSet, names ...string) { annotate(f, ifGiven, names) }

func annotate(f *pflag.FlagSet, how string, names []string) {
	for _, name := range names {
		if err := f.SetAnnotation(name, comparison, []string{how}); err != nil {
			panic("cli: " + err.Error()) // the flag is not defined
		}
	}
}

// Compared calls f for the flags that must be the same on all workers of a job, with the values to compare: all flags
// except those that are marked.
func Compared(flags *pflag.FlagSet, f func(name, value string)) {
	flags.VisitAll(func(flag *pflag.Flag) {
		value := flag.Value.String()
		if how := flag.Annotations[comparison]; how != nil {
			if how[0] == notCompared {
				return
			}
			given := "given"
			if value == "" {
				given = "not given"
			}
			value = given
		}
		f(flag.Name, value)
	})
}
