package inspect

import (
	"fmt"
	"io"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/monitor"
)

// variable is an environment variable that Lockstep reads. Settings in a program take precedence.
type variable struct {
	Name  string `json:"name"`
	About string `json:"about"`
	Set   bool   `json:"set"`
	Value string `json:"value,omitempty"` // never a secret
}

// variables lists the variables that Lockstep defines. A test compares it with the code.
var variables = []variable{
	{Name: "LOCKSTEP_ALGORITHM", About: "algorithm of the collectives: direct, or all_reduce:direct,..."},
	{Name: "LOCKSTEP_TABLE", About: "file that lockstep bench --calibrate wrote, from which algorithms are chosen"},
	{Name: "LOCKSTEP_MPI", About: "file of the MPI library"},
	{Name: "LOCKSTEP_NCCL", About: "file of the NCCL library"},
	{Name: "LOCKSTEP_CUDART", About: "file of CUDA's runtime library, which NCCL needs"},
	{Name: "LOCKSTEP_XLA_PLUGIN", About: "file of the XLA plugin, in builds with XLA"},
	{Name: cluster.EnvSource, About: "launcher to detect the job from, if there are several"},
	{Name: cluster.EnvJob, About: "name of the job"},
	{Name: cluster.EnvStore, About: "URL of the rendezvous store: tcp://host:port, file:///folder, etcd://..."},
	{Name: cluster.EnvWorker, About: "number of this worker, from 0"},
	{Name: cluster.EnvWorkers, About: "number of workers"},
	{Name: cluster.EnvLocalWorker, About: "number of this worker on its host"},
	{Name: cluster.EnvLocalWorkers, About: "number of workers on its host"},
	{Name: cluster.EnvEpoch, About: "number of restarts of the job so far"},
	{Name: cluster.EnvSecret, About: "the job's secret; the same on all hosts"},
	{Name: cluster.EnvSecretFile, About: "file that holds the secret"},
	{Name: cluster.EnvRecords, About: "folder for records of failures and of the last collectives, which lockstep " +
		"doctor reads"},
	{Name: cluster.EnvNode, About: "number of this node among those of lockstep run"},
	{Name: cluster.EnvNodeFile, About: "file by which lockstep run reads its workers' heartbeats"},
	{Name: cluster.EnvTFConfigFile, About: "file with parts of TF_CONFIG, such as a cluster too long for a variable"},
	{Name: monitor.TokenEnv, About: "token of the live page (--dashboard), for addresses that are not loopback"},
	{Name: "LOCKSTEP_SSH", About: "command with which lockstep run -H reaches hosts"},
}

// otherVariables describes the variables of other systems that Lockstep reads.
const otherVariables = "TF_CONFIG, and those of torchrun, Slurm, Open MPI, MPICH, Kubernetes and Kubeflow describe " +
	"the job: see lockstep check --job\n" +
	"KUBEFLOW_TRAINER_SERVER_* give the server to which lockstep train reports its progress in a TrainJob\n" +
	"PET_* set flags of lockstep run; GOMAXPROCS, GOGC and GOMEMLIMIT have Go's meaning\n"

func printEnvironment(out io.Writer, format string, lookup func(string) (string, bool)) error {
	var t cli.Table
	for _, v := range variables {
		v.Value, v.Set = lookup(v.Name)
		shown := "not set"
		if v.Set {
			v.Value = cluster.Value{Name: v.Name, Value: v.Value}.Shown()
			shown = v.Value
		}
		switch format {
		case "json":
			if err := cli.WriteJSON(out, v); err != nil {
				return err
			}
		case "plain":
			if !v.Set {
				continue
			}
			if _, err := fmt.Fprintf(out, "%s=%s\n", v.Name, v.Value); err != nil {
				return err
			}
		default:
			t.Row(v.Name, "%s", v.About)
			t.Row("", "  %s", shown)
		}
	}
	if format != "table" {
		return nil
	}
	if err := t.Print(out); err != nil {
		return err
	}
	_, err := io.WriteString(out, "\n"+otherVariables)
	return err
}
