package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// elsewhere maps names of flags in other programs (mpirun -np, srun, scripts of PyTorch) to the flags of the same
// meaning here.
var elsewhere = map[string]string{
	"lr": "learning-rate", "wd": "weight-decay", "batch": "global-batch", "batch-size": "global-batch",
	"n": "nproc-per-node", "ntasks-per-node": "nproc-per-node",
}

// suggestFlag adds the flag that was probably meant to the error of an unknown flag.
func suggestFlag(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	if name := elsewhere[unknown.GetSpecifiedName()]; name != "" && cmd.Flags().Lookup(name) != nil {
		return fmt.Errorf("%w: did you mean --%s?", err, name)
	}
	if name := Closest(unknown.GetSpecifiedName(), names); name != "" {
		return fmt.Errorf("%w: did you mean --%s?", err, name)
	}
	return err
}

// Closest returns the name that word probably misspells, or an empty string. It is the only name that begins with
// word, or else the name with the fewest edits (insert, delete, replace or swap letters), if these are fewer than
// half of the letters.
func Closest(word string, names []string) string {
	best, least := "", (len(word)+1)/2
	var longer []string
	for _, name := range names {
		if len(word) > 1 && strings.HasPrefix(name, word) {
			longer = append(longer, name)
		}
	}
	if len(longer) == 1 {
		return longer[0]
	}
	for _, name := range names {
		if d := distance(word, name); d < least {
			best, least = name, d
		}
	}
	return best
}

// distance returns the number of edits between a and b (optimal string alignment).
func distance(a, b string) int {
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replace := 1
			if a[i-1] == b[j-1] {
				replace = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+replace)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}
