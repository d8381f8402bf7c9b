package bench

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/launch"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/run"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
)

// job returns the job that the flags and the environment describe: without a description, a single-process job.
func (o *benchTrainFlags) job() (*cluster.Job, error) {
	flags := o.WorkerFlags
	if flags.Worker < 0 {
		flags.Workers = 0 // it is the number of workers to start
	}
	return flags.Discover()
}

// runBenchWorkers starts this command again, as the workers of a job on this machine.
func runBenchWorkers(cmd *cobra.Command, o benchTrainFlags) error {
	args := []string{"bench", "train", fmt.Sprintf("--replicas=%d", o.replicas)}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Name != "replicas" && f.Name != "workers" {
			args = append(args, fmt.Sprintf("--%s=%s", f.Name, f.Value))
		}
	})
	return run.Local(cmd.Context(), cmd.OutOrStdout(), launch.Config{Workers: o.Workers}, args...)
}

// share makes this process a worker of the job, with its share of the replicas.
func (o *benchTrainFlags) share(cfg setup.SessionConfig, job *cluster.Job) (setup.SessionConfig, error) {
	if job.Workers > o.replicas {
		return cfg, cli.Usagef("--replicas %d: want at least one for each of the %d workers", o.replicas, job.Workers)
	}
	cfg.Job, cfg.Workers = job, &o.WorkerFlags
	cfg.Replicas = o.replicas / job.Workers
	if job.Worker < o.replicas%job.Workers {
		cfg.Replicas++
	}
	cfg.LogicalCPUs = cfg.Replicas
	return cfg, nil
}
