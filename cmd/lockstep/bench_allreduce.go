package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/collective/bench"
)

func newBenchAllReduce() *cobra.Command {
	var o bench.Options
	transports := strings.Join(slices.Sorted(maps.Keys(bench.Transports)), ", ")
	cmd := &cobra.Command{
		Use:   "allreduce",
		Short: "Measure an all-reduce of float32 between ranks",
		Long: `Allreduce measures the sum of float32 vectors over all ranks, from one buffer to
another, with a barrier before each timed call. It prints the median time of a
call on rank 0 for each size:

  lockstep-mem ranks=2 bytes=1048576 us=101.3`,
		Example: `  lockstep bench allreduce --ranks 2
  lockstep bench allreduce --ranks 4 --sizes 1024,1048576 --format table`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case bench.Transports[o.Transport] == nil:
				return fmt.Errorf("--transport %s: there is no such transport yet: want one of %s", o.Transport, transports)
			case o.Ranks < 1 || o.Ranks > replicasMax:
				return usagef("--ranks %d: want 1 to %d", o.Ranks, replicasMax)
			case o.Format != "plain" && o.Format != "table":
				return usagef("--format %s: want plain or table", o.Format)
			}
			for _, size := range o.Sizes {
				if size < 4 || size%4 != 0 {
					return usagef("--sizes: %d is no multiple of 4 bytes, the size of a float32", size)
				}
			}
			in := catchInterrupts(cmd.Context())
			defer in.close()
			err := bench.Run(in, cmd.OutOrStdout(), o)
			if in.asked.Load() {
				return errInterrupted
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Transport, "transport", "mem", "how the ranks reach each other: "+transports)
	f.IntVar(&o.Ranks, "ranks", 2, "number of ranks")
	f.IntSliceVar(&o.Sizes, "sizes", bench.Sizes, "sizes of a call, in bytes")
	f.StringVar(&o.Algorithm, "algorithm", "", "algorithm (default: the library's choice)")
	f.StringVar(&o.Format, "format", "plain", "plain: one line per size for other programs; table")
	return cmd
}
