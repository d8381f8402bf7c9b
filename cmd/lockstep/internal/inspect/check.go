package inspect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/internal/foreign"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/internal/units"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

// finding is one feature that this build or machine has or lacks.
type finding struct {
	Topic  string         `json:"topic"`
	Name   string         `json:"name"`
	Usable bool           `json:"usable"`
	Text   string         `json:"text"`             // for people
	Values map[string]any `json:"values,omitempty"` // the numbers and names in Text, for programs
}

// NewCheck returns lockstep check.
func NewCheck() *cobra.Command {
	var format, probe string
	var job bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Show what this build and this machine support",
		Long: `Check shows what this build and this machine support: the transports that work
here, the vector instructions in use, the libraries (MPI, NCCL) that can be
loaded and their versions, the processors, the memory, and the limits that can
affect a job. LOCKSTEP_MPI and LOCKSTEP_NCCL name the file of a library that is
outside the system's search path.

With --job it shows instead which job this process is a worker of, which source
it took this from, and each value that it read: run it instead of the program.

'lockstep doctor --env' lists the environment variables that Lockstep reads.`,
		Example: `  lockstep check
  lockstep check --format json
  srun lockstep check --job`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if probe != "" {
				l, err := foreign.Find(probe)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n%s\n", l.Version, l.Path)
				return err
			}
			if job {
				return printJob(cmd.OutOrStdout(), format)
			}
			return printFindings(cmd.OutOrStdout(), format, findings(cmd.Context()))
		},
	}
	f := cmd.Flags()
	cli.ChoiceVar(f, &format, "format", "table", "", "table", "json")
	f.BoolVar(&job, "job", false, "show the job that this process is a worker of")
	f.StringVar(&probe, "probe", "", "load this library and print its version")
	if err := f.MarkHidden("probe"); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

func printFindings(w io.Writer, format string, all []finding) error {
	if format == "json" {
		for _, f := range all {
			if err := cli.WriteJSON(w, f); err != nil {
				return err
			}
		}
		return nil
	}
	var t cli.Table
	topic := ""
	for _, f := range all {
		if f.Topic != topic {
			topic = f.Topic
			t.Row(topic, "")
		}
		mark := "yes  "
		if !f.Usable {
			mark = "no   "
		}
		t.Row("  "+f.Name, "%s%s", mark, f.Text)
	}
	return t.Print(w)
}

// findings checks all features.
func findings(ctx context.Context) []finding {
	var out []finding
	add := func(values map[string]any, topic, name string, usable bool, format string, args ...any) {
		out = append(out, finding{topic, name, usable, fmt.Sprintf(format, args...), values})
	}
	add(map[string]any{
		"version": cli.Version(), "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
	}, "build", "version", true, "%s, %s, %s/%s", cli.Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	level := kernel.Level()
	add(map[string]any{"instructions": level, "processor": machine.Vectors()}, "build", "reductions", level != "none",
		"vector instructions: %s (the processor has %s)", level, machine.Vectors())
	add(nil, "transports", "mem", true, "goroutines of one process, through its memory")
	if shm.HostID() != "" {
		add(nil, "transports", "shm", true, "processes of this host, through shared memory")
	} else {
		add(nil, "transports", "shm", false, "this system has no shared memory between processes; processes of one host use "+
			"sockets")
	}
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err != nil {
		add(nil, "transports", "tcp", false, "%v", err)
	} else {
		l.Close()
		add(nil, "transports", "tcp", true, "processes anywhere, through sockets")
	}
	for _, name := range foreign.Names() {
		l, err := probeLibrary(ctx, name)
		if err != nil {
			add(nil, "libraries", name, false, "%v", err)
		} else {
			add(map[string]any{"version": l.Version, "path": l.Path}, "libraries", name, true, "%s (%s)", l.Version, l.Path)
		}
	}
	add(map[string]any{"count": runtime.NumCPU(), "usable": runtime.GOMAXPROCS(0)}, "machine", "processors", true,
		"%d, of which this process can use %d", runtime.NumCPU(), runtime.GOMAXPROCS(0))
	if n := machine.Memory(); n > 0 {
		add(map[string]any{"bytes": n}, "machine", "memory", true, "%s", units.Bytes(int(n)))
	}
	return append(out, limitFindings()...)
}

// probeTime bounds how long a library may take to load.
const probeTime = 20 * time.Second

// probeLibrary loads a library in a separate process, because loading runs code of the library.
func probeLibrary(ctx context.Context, name string) (foreign.Library, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return foreign.Library{}, err
	}
	cmd := exec.CommandContext(ctx, self, "check", "--probe", name)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdout, err := cmd.Output()
	if err != nil {
		text := strings.TrimPrefix(strings.TrimSpace(stderr.String()), "lockstep: foreign: ")
		if text == "" {
			text = err.Error() // for example, the process was killed
		}
		if first, _, more := strings.Cut(text, "\n"); more {
			text = first
		}
		return foreign.Library{}, errors.New(strings.TrimSpace(text))
	}
	version, path, _ := strings.Cut(strings.TrimSpace(string(stdout)), "\n")
	return foreign.Library{Name: name, Version: version, Path: path}, nil
}

// jobFinding is the job of this process as JSON.
type jobFinding struct {
	Source       string       `json:"source"`
	ID           string       `json:"id,omitempty"`
	Worker       int          `json:"worker"`
	Workers      int          `json:"workers"`
	LocalWorker  int          `json:"local_worker"` // -1: unknown
	LocalWorkers int          `json:"local_workers"`
	Store        string       `json:"store,omitempty"`
	Hosted       bool         `json:"hosted"`
	NoStore      string       `json:"no_store,omitempty"`
	Epoch        uint32       `json:"epoch"`
	Cluster      cluster.Spec `json:"cluster"`
	Task         string       `json:"task"`
	Read         []string     `json:"read"`
	Beside       []string     `json:"beside,omitempty"`
}

// printJob prints the job that this process is a worker of.
func printJob(w io.Writer, format string) error {
	job, err := cluster.Discover(cluster.Discovery{})
	if err != nil {
		return err
	}
	if format == "table" {
		_, err = io.WriteString(w, job.Describe()) // one write: several workers may share a terminal
		return err
	}
	out := jobFinding{
		Source: job.Source, ID: job.ID, Worker: job.Worker, Workers: job.Workers, LocalWorker: job.LocalWorker,
		LocalWorkers: job.LocalWorkers,
		Store:        cluster.Value{Name: "store", Value: job.Store}.Shown(), Hosted: job.Hosted, NoStore: job.NoStore,
		Epoch: job.Epoch, Cluster: job.Spec, Task: job.Task.String(),
	}
	for _, v := range job.Values {
		out.Read = append(out.Read, v.String())
	}
	for _, c := range job.Beside {
		out.Beside = append(out.Beside, c.String())
	}
	return cli.WriteJSON(w, out)
}
