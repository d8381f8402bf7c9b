package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/launch"
)

// job returns the job that the flags and the environment describe: without a description, a single-process job.
func (o *benchTrainFlags) job() (*cluster.Job, error) {
	flags := o.workerFlags
	if flags.worker < 0 {
		flags.workers = 0 // it is the number of workers to start
	}
	return flags.discover()
}

// runBenchWorkers starts this command again, as the workers of a job on this machine.
func runBenchWorkers(cmd *cobra.Command, o benchTrainFlags) error {
	command, err := ownCommand("bench", "train", fmt.Sprintf("--replicas=%d", o.replicas))
	if err != nil {
		return err
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Name != "replicas" && f.Name != "workers" {
			command = append(command, fmt.Sprintf("--%s=%s", f.Name, f.Value))
		}
	})
	guard, err := ownCommand(guardCommand)
	if err != nil {
		return err
	}
	shown := make(readers, 1)
	agent, err := launch.New(launch.Config{
		Command: command, Workers: o.workers, ID: newJobID("run", time.Now(), os.Getpid()), Guard: guard,
		Stdout: withoutPrefix{shown.of(cmd.OutOrStdout())}, Stderr: shown.of(os.Stderr),
	})
	if err != nil {
		return err
	}
	defer passOnSignals(agent.Interrupt, shown)()
	outcome, err := agent.Run(cmd.Context())
	if err != nil {
		return err
	}
	return endWith(outcome.Code)
}

// share makes this process a worker of the job, with its share of the replicas.
func (o *benchTrainFlags) share(cfg sessionConfig, job *cluster.Job) (sessionConfig, error) {
	if job.Workers > o.replicas {
		return cfg, usagef("--replicas %d: want at least one for each of the %d workers", o.replicas, job.Workers)
	}
	cfg.job, cfg.workers = job, &o.workerFlags
	cfg.replicas = o.replicas / job.Workers
	if job.Worker < o.replicas%job.Workers {
		cfg.replicas++
	}
	cfg.logicalCPUs = cfg.replicas
	return cfg, nil
}
