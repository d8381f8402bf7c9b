package run

import (
	"bytes"
	"embed"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
)

//go:embed templates/*.tmpl
var templateFiles embed.FS

// rendering holds the flags of lockstep render, and the values that the templates read.
type rendering struct {
	Name        string
	Nodes, Each int // hosts or pods, and workers on each
	MaxRestarts int
	CPUs        int // of a worker's task
	GPUs        int // of a node
	Memory      string
	program     []string

	// Kubernetes
	Image, Namespace, SecretName, Secret string
	JobSet, TrainJob                     bool
	Runtime                              string // of a TrainJob
	claims                               []string
	Claims                               []claim

	// Slurm
	Time, Partition, Account string

	// MPI
	Launcher string
	hosts    string
	Hosts    []mpiHost

	port int
}

// claim is a volume of the pods; mpiHost is a host with its number of workers.
type (
	claim   struct{ Name, Path string }
	mpiHost struct {
		Name  string
		Slots int
	}
)

// defaultProgram is the program that runs if none is given.
var defaultProgram = []string{"lockstep", "train", "--strategy", "multi-worker"}

// NewRender returns lockstep render.
func NewRender() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "render",
		Short: "Print a manifest or script that starts a job",
		Long: `Render prints a file that starts a program as the workers of one job: a manifest
for Kubernetes, a batch script for Slurm, or a shell script for mpirun. The
program needs no changes: it detects its job from the environment, as lockstep
check --job does.

The file is complete. It holds a secret, with which the workers authenticate one
another, sets the rendezvous address, and restarts the job after a failure.`,
		Args: cli.WantCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newRenderKubernetes(), newRenderSlurm(), newRenderMPI())
	return cmd
}

func newRenderKubernetes() *cobra.Command {
	r := &rendering{}
	cmd := r.command("kubernetes", "Print a manifest for an Indexed Job, a JobSet or a TrainJob",
		`Kubernetes prints a manifest: a Secret, a headless Service that gives the pods
DNS names, and an Indexed Job with one pod per node. With --jobset it prints a
JobSet, whose controller restarts all pods at once after a failure; a plain Job
restarts them one by one. With --trainjob it prints a TrainJob for Kubeflow's
Trainer (2.2 or later), with one of its runtimes for torchrun or JAX.

The image must contain the program, and also lockstep if --nproc-per-node is
more than 1. The manifest holds a new secret, so keep it out of version control.
Or create a Secret with the key "secret" and name it with --secret.`,
		`  lockstep render kubernetes --image registry/train:7 --nnodes 4 -- /train --epochs 3
  lockstep render kubernetes --image registry/train:7 --nnodes 4 --jobset \
    --max-restarts 3 --claim checkpoints:/checkpoints -- \
    lockstep train --strategy multi-worker --checkpoint-dir /checkpoints
  lockstep render kubernetes --image registry/train:7 --nnodes 4 --trainjob`,
		func(w io.Writer) error { return r.kubernetes(w, secret.New().Text()) })
	f := cmd.Flags()
	f.StringVar(&r.Image, "image", "", "the container image")
	r.sizes(f, "pods", "workers in each pod")
	r.restartsFlag(f)
	r.nameFlag(f)
	r.portFlag(f, "the first pod")
	f.StringVar(&r.Namespace, "namespace", "", "namespace (default: that of kubectl)")
	f.BoolVar(&r.JobSet, "jobset", false, "print a JobSet, which needs its controller in the cluster")
	f.BoolVar(&r.TrainJob, "trainjob", false, "print a TrainJob, which needs Kubeflow's Trainer in the cluster")
	f.StringVar(&r.Runtime, "runtime", "", "ClusterTrainingRuntime of the TrainJob: jax-distributed, or one like "+
		"it (default torch-distributed)")
	f.StringVar(&r.SecretName, "secret", "", "an existing Secret with the key \"secret\" (default: a new one in the "+
		"manifest)")
	f.IntVar(&r.CPUs, "cpus", 0, "CPUs of each pod")
	f.IntVar(&r.GPUs, "gpus", 0, "NVIDIA GPUs of each pod")
	cli.Limit(f, "[0,)", "cpus", "gpus")
	f.StringVar(&r.Memory, "memory", "", "memory of each pod, such as 8Gi")
	f.StringArrayVar(&r.claims, "claim", nil, "persistent volume claim and its mount path, as NAME:PATH")
	return cmd
}

func newRenderSlurm() *cobra.Command {
	r := &rendering{}
	cmd := r.command("slurm", "Print a batch script for Slurm",
		`Slurm prints a script for sbatch, which starts one worker per task with srun.
The rendezvous is on the first node, at a port derived from the job's number.`,
		`  lockstep render slurm --nnodes 4 --nproc-per-node 2 --cpus 16 --time 8:00:00 -- \
    ./train --epochs 3 > train.sbatch
  sbatch train.sbatch`,
		r.slurm)
	f := cmd.Flags()
	r.sizes(f, "nodes", "workers on each node")
	r.restartsFlag(f)
	r.nameFlag(f)
	f.IntVar(&r.CPUs, "cpus", 0, "CPUs of each worker")
	f.IntVar(&r.GPUs, "gpus", 0, "GPUs of each node")
	cli.Limit(f, "[0,)", "cpus", "gpus")
	f.StringVar(&r.Memory, "memory", "", "memory of each node, such as 64G")
	f.StringVar(&r.Time, "time", "", "time limit, such as 8:00:00; two minutes before it, the workers get SIGTERM")
	f.StringVar(&r.Partition, "partition", "", "partition")
	f.StringVar(&r.Account, "account", "", "account")
	return cmd
}

func newRenderMPI() *cobra.Command {
	r := &rendering{}
	cmd := r.command("mpi", "Print a script for mpirun",
		`Mpi prints a script that starts the workers with Open MPI's mpirun, or with
MPICH's or Intel MPI's mpiexec. On one host the workers need nothing else; on
several hosts the rendezvous is on the first one. The program uses Lockstep's
own collectives unless it selects MPI's.`,
		`  lockstep render mpi --nproc-per-node 4 -- ./train --epochs 3
  lockstep render mpi -H node1:2,node2:2 --launcher mpich -- ./train`,
		r.mpi)
	f := cmd.Flags()
	f.IntVar(&r.Each, "nproc-per-node", 0, "workers on this host; without -H")
	cli.Limit(f, sizesAllowed, "nproc-per-node")
	f.StringVarP(&r.hosts, "hosts", "H", "", "`hosts` and their numbers of workers, such as host1:4,host2:4")
	cli.ChoiceVar(f, &r.Launcher, "launcher", "openmpi", "openmpi, or mpich (also for Intel MPI)", "openmpi", "mpich")
	r.restartsFlag(f)
	r.portFlag(f, "the first of several hosts")
	return cmd
}

// command returns one of the subcommands, with their common parts.
func (r *rendering) command(name, short, long, example string, print func(io.Writer) error) *cobra.Command {
	cmd := &cobra.Command{
		Use:     name + " [flags] [-- PROGRAM ARGS…]",
		Short:   short,
		Long:    long + "\n\nThe default program is " + strings.Join(defaultProgram, " ") + ".",
		Example: example,
		RunE: func(cmd *cobra.Command, args []string) error {
			if dash := cmd.ArgsLenAtDash(); len(args) > 0 && dash != 0 {
				return cli.Usagef("want -- before the program and its arguments: lockstep render %s … -- %s", name,
					strings.Join(args, " "))
			}
			if r.program = args; len(args) == 0 {
				r.program = defaultProgram
			}
			return print(cmd.OutOrStdout())
		},
	}
	return cmd
}

func (r *rendering) restartsFlag(f *pflag.FlagSet) {
	f.IntVar(&r.MaxRestarts, "max-restarts", 0, "maximum number of restarts of a failed job (default 0)")
	cli.Limit(f, "[0,1000]", "max-restarts")
}

func (r *rendering) nameFlag(f *pflag.FlagSet) {
	f.StringVar(&r.Name, "name", "train", "name of the job")
}

func (r *rendering) portFlag(f *pflag.FlagSet, where string) {
	f.IntVar(&r.port, "port", cluster.StorePort, "rendezvous port on "+where)
	cli.Limit(f, "[1,65535]", "port")
}

func (r *rendering) sizes(f *pflag.FlagSet, hosts, each string) {
	f.IntVar(&r.Nodes, "nnodes", 0, "number of "+hosts)
	f.IntVar(&r.Each, "nproc-per-node", 1, each)
	cli.Limit(f, sizesAllowed, "nnodes", "nproc-per-node")
}

// sizesAllowed are the numbers of hosts, and of workers on each, that a typing error does not exceed.
const sizesAllowed = "[1,65536]"

// Values that need no quotes in a manifest or a script.
var (
	labelText    = regexp.MustCompile(`^[a-z]([-a-z0-9]*[a-z0-9])?$`) // RFC 1035
	subdomain    = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	quantityText = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?([KMGTP]i?|k)?$`)
	slurmTime    = regexp.MustCompile(`^[0-9]+(-[0-9]+)?(:[0-9]+){0,2}$`)
	slurmWord    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.,-]*$`)
	hostText     = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
)

const labelMax = 63 // bytes in a label of a host's name

// podSuffix is as long as what Kubernetes appends to the name of each pod of a JobSet. The webhook of JobSet v0.12.0
// counts it: it refuses a set whose longest pod name with it is not a valid label (ValidateCreate in
// pkg/webhooks/jobset_webhook.go). Trainer makes a JobSet of each TrainJob, with its name.
const podSuffix = "-abcde"

// check validates the common flags.
func (r *rendering) check() error {
	switch {
	case r.Memory != "" && !quantityText.MatchString(r.Memory):
		return cli.Usagef("--memory %s: want a size such as 8Gi", r.Memory)
	case slices.ContainsFunc(r.program, func(s string) bool { return strings.ContainsRune(s, 0) }):
		return cli.Usagef("an argument of the program holds a zero byte")
	}
	return nil
}

// checkSizes validates the number of nodes.
func (r *rendering) checkSizes() error {
	if r.Nodes == 0 {
		return cli.Usagef("--nnodes is missing: want the number of hosts")
	}
	return nil
}

// Total returns the number of workers.
func (r *rendering) Total() int { return r.Nodes * r.Each }

// BackoffLimit returns how many pods of a plain Job may fail.
func (r *rendering) BackoffLimit() int { return r.MaxRestarts * r.Nodes }

// ReplicatedJob returns the name of the only Job of a JobSet. Kubeflow's runtimes name theirs node.
func (r *rendering) ReplicatedJob() string {
	if r.TrainJob {
		return "node"
	}
	return "workers"
}

// FirstPod returns the name of worker 0's pod.
func (r *rendering) FirstPod() string { return r.pod(0) }

func (r *rendering) pod(i int) string {
	if r.JobSet || r.TrainJob {
		return fmt.Sprintf("%s-%s-0-%d", r.Name, r.ReplicatedJob(), i)
	}
	return fmt.Sprintf("%s-%d", r.Name, i)
}

// Subdomain returns the Service that gives the pods their names.
func (r *rendering) Subdomain() string { return r.Name }

// PodCommand returns the command of a pod: the program, or lockstep run if a pod has several workers.
func (r *rendering) PodCommand() []string {
	var out []string
	for _, word := range r.program {
		out = append(out, strings.ReplaceAll(word, "$(", "$$(")) // Kubernetes replaces $(NAME)
	}
	if r.Each == 1 {
		return out
	}
	return append([]string{
		"lockstep", "run", "--nnodes", strconv.Itoa(r.Nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)", "--nproc-per-node",
		strconv.Itoa(r.Each),
		"--rdzv-backend", "tcp", "--rdzv-endpoint", r.endpoint(), "--rdzv-id", r.Name, "--",
	}, out...)
}

// Resources returns the limits of a pod.
func (r *rendering) Resources() (out []struct{ Name, Value string }) {
	add := func(name, value string) { out = append(out, struct{ Name, Value string }{name, value}) }
	if r.CPUs > 0 {
		add("cpu", strconv.Itoa(r.CPUs))
	}
	if r.Memory != "" {
		add("memory", r.Memory)
	}
	if r.GPUs > 0 {
		add("nvidia.com/gpu", strconv.Itoa(r.GPUs))
	}
	return out
}

// kubernetes writes the manifest.
func (r *rendering) kubernetes(w io.Writer, newSecret string) error {
	if err := r.checkKubernetes(); err != nil {
		return err
	}
	if r.SecretName == "" {
		r.SecretName, r.Secret = r.Name, newSecret
	}
	return execute(w, "kubernetes.tmpl", r)
}

func (r *rendering) checkKubernetes() error {
	if err := r.check(); err != nil {
		return err
	}
	if err := r.checkSizes(); err != nil {
		return err
	}
	if r.TrainJob && r.Runtime == "" {
		r.Runtime = "torch-distributed"
	}
	last := r.pod(r.Nodes - 1)
	if r.JobSet || r.TrainJob {
		last += podSuffix
	}
	switch {
	case r.JobSet && r.TrainJob:
		return cli.Usagef("--jobset and --trainjob are two kinds of manifest: give one")
	case r.TrainJob && r.MaxRestarts > 0:
		return cli.Usagef("--max-restarts does not apply to a TrainJob: set spec.template.spec.failurePolicy in its "+
			"runtime %s", r.Runtime)
	case r.Runtime != "" && !r.TrainJob:
		return cli.Usagef("--runtime %s applies to a TrainJob only: add --trainjob", r.Runtime)
	case r.TrainJob && !subdomain.MatchString(r.Runtime):
		return cli.Usagef("--runtime %s: want the name of a ClusterTrainingRuntime", r.Runtime)
	case !labelText.MatchString(r.Name):
		return cli.Usagef("--name %s: want lower-case letters, digits and hyphens, starting with a letter", r.Name)
	case len(last) > labelMax:
		return cli.Usagef("--name %s is too long: the last pod's name would be %s, of %d characters, and Kubernetes "+
			"allows %d: "+"want a name of at most %d", r.Name, last, len(last), labelMax, len(r.Name)-(len(last)-labelMax))
	case r.Image == "" || strings.ContainsAny(r.Image, " \t\n"):
		return cli.Usagef("--image %q: want the name of a container image", r.Image)
	case r.Namespace != "" && (!labelText.MatchString(r.Namespace) || len(r.Namespace) > labelMax):
		return cli.Usagef("--namespace %s: want lower-case letters, digits and hyphens", r.Namespace)
	case r.SecretName != "" && !subdomain.MatchString(r.SecretName):
		return cli.Usagef("--secret %s: want the name of a Secret", r.SecretName)
	case slices.ContainsFunc(r.program, func(s string) bool { return !utf8.ValidString(s) }):
		return cli.Usagef("an argument of the program is not UTF-8, as a manifest must be")
	}
	for _, text := range r.claims {
		name, path, _ := strings.Cut(text, ":")
		if !subdomain.MatchString(name) || !strings.HasPrefix(path, "/") || strings.Contains(path, ":") {
			return cli.Usagef("--claim %s: want NAME:PATH, with a path from the root", text)
		}
		r.Claims = append(r.Claims, claim{name, path})
	}
	return nil
}

// slurm writes the batch script.
func (r *rendering) slurm(w io.Writer) error {
	if err := r.check(); err != nil {
		return err
	}
	if err := r.checkSizes(); err != nil {
		return err
	}
	switch {
	case !slurmWord.MatchString(r.Name):
		return cli.Usagef("--name %s: want letters, digits, hyphens and underscores", r.Name)
	case r.Time != "" && !slurmTime.MatchString(r.Time):
		return cli.Usagef("--time %s: want minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS", r.Time)
	case r.Partition != "" && !slurmWord.MatchString(r.Partition):
		return cli.Usagef("--partition %s: want the name of a partition", r.Partition)
	case r.Account != "" && !slurmWord.MatchString(r.Account):
		return cli.Usagef("--account %s: want the name of an account", r.Account)
	}
	r.Launcher = "slurm"
	return execute(w, "slurm.tmpl", r)
}

// mpi writes the script.
func (r *rendering) mpi(w io.Writer) error {
	if err := r.check(); err != nil {
		return err
	}
	switch {
	case r.hosts == "" && r.Each == 0:
		return cli.Usagef("want --nproc-per-node, the number of workers on this host, or -H, the hosts")
	case r.hosts != "" && r.Each != 0:
		return cli.Usagef("--nproc-per-node and -H both set the number of workers: give one")
	}
	r.Nodes = 1
	if r.hosts != "" {
		if err := r.parseHosts(); err != nil {
			return err
		}
	}
	return execute(w, "mpi.tmpl", r)
}

// parseHosts reads host1:4,host2:4. A host without a number has one worker.
func (r *rendering) parseHosts() error {
	r.Each = 0 // the total, as Nodes is 1
	for _, text := range strings.Split(r.hosts, ",") {
		name, count, given := strings.Cut(text, ":")
		n, err := strconv.Atoi(count)
		if !given {
			n, err = 1, nil
		}
		switch {
		case !hostText.MatchString(name) || err != nil || n < 1 || n > 1<<16:
			return cli.Usagef("-H %s: want HOST:WORKERS, not %q", r.hosts, text)
		case slices.ContainsFunc(r.Hosts, func(h mpiHost) bool { return h.Name == name }):
			return cli.Usagef("-H %s: %s is listed twice", r.hosts, name)
		}
		r.Hosts = append(r.Hosts, mpiHost{name, n})
		r.Each += n
	}
	return nil
}

// Store returns the rendezvous address for several hosts.
func (r *rendering) Store() string { return fmt.Sprintf("tcp://%s:%d", r.Hosts[0].Name, r.port) }

// PodStore returns the rendezvous address of the pods, or an empty string if they can derive it.
func (r *rendering) PodStore() string {
	if r.port == cluster.StorePort {
		return ""
	}
	return "tcp://" + r.endpoint()
}

func (r *rendering) endpoint() string { return fmt.Sprintf("%s.%s:%d", r.FirstPod(), r.Name, r.port) }

// Command returns the line that starts the workers. Processes are not bound to cores: a worker has many threads.
func (r *rendering) Command() string {
	var words []string
	var hosts []string
	for _, h := range r.Hosts {
		hosts = append(hosts, fmt.Sprintf("%s:%d", h.Name, h.Slots))
	}
	switch r.Launcher {
	case "slurm":
		words = []string{"srun", "--kill-on-bad-exit=1"}
	case "openmpi":
		words = []string{
			"mpirun", "-np", strconv.Itoa(r.Total()), "--map-by", "slot", "--bind-to", "none", "-x",
			cluster.EnvSecret,
		}
		if len(hosts) > 0 {
			words = append(words, "--host", strings.Join(hosts, ","))
		}
		if len(hosts) > 1 {
			words = append(words, "-x", cluster.EnvStore)
		}
	case "mpich": // which passes on the whole environment
		words = []string{"mpiexec", "-n", strconv.Itoa(r.Total()), "-bind-to", "none"}
		if len(hosts) > 0 {
			words = append(words, "-hosts", strings.Join(hosts, ","))
		}
	}
	var quoted []string
	for _, word := range append(words, r.program...) {
		quoted = append(quoted, shellQuote(word))
	}
	return strings.Join(quoted, " ")
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// shellQuote quotes a word for a shell.
func shellQuote(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// execute fills in a template.
func execute(w io.Writer, name string, data any) error {
	t := template.New(name).Option("missingkey=error")
	t, err := t.Funcs(template.FuncMap{
		"yaml":  strconv.Quote, // for valid UTF-8 its escapes are those of YAML
		"quote": shellQuote,
		"indent": func(n int, text string) string {
			space := strings.Repeat(" ", n)
			return space + strings.ReplaceAll(text, "\n", "\n"+space)
		},
		"include": func(name string, data any) (string, error) {
			var b strings.Builder
			err := t.ExecuteTemplate(&b, name, data)
			return strings.TrimSpace(b.String()), err
		},
	}).ParseFS(templateFiles, "templates/*.tmpl")
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, data); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", bytes.TrimSpace(b.Bytes()))
	return err
}
