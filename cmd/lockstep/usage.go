package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// flagGroup is a set of flags that the help of a command lists under a separate heading.
type flagGroup struct {
	heading string
	flags   *pflag.FlagSet
}

// groupFlags makes the help of a command list some of its flags in groups, after the other flags.
func groupFlags(cmd *cobra.Command, groups ...flagGroup) {
	cmd.SetUsageFunc(func(c *cobra.Command) error {
		rest := pflag.NewFlagSet("", pflag.ContinueOnError)
		rest.SortFlags = false
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			for _, g := range groups {
				if g.flags.Lookup(f.Name) != nil {
					return
				}
			}
			rest.AddFlag(f)
		})
		var b strings.Builder
		fmt.Fprintf(&b, "Usage:\n  %s\n\nExamples:\n%s\n", c.UseLine(), c.Example)
		for _, g := range append([]flagGroup{{"Flags", rest}}, groups...) {
			fmt.Fprintf(&b, "\n%s:\n%s", g.heading, g.flags.FlagUsagesWrapped(helpColumns))
		}
		_, err := fmt.Fprint(c.OutOrStderr(), b.String())
		return err
	})
}
