package launch

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster"
)

// assignment is a worker's identity in its job, and its environment.
type assignment struct {
	id                    string
	epoch                 uint32
	restartsMax           int
	rank, world           int
	local, locals         int
	node, nodes           int
	masterAddr            string
	masterPort            int
	addresses             []string // of all workers, by rank: their addresses in TF_CONFIG
	nodeFile              string
	clusterFile           string // has TF_CONFIG's cluster; "": TF_CONFIG itself has it
	store, secret, record string // "": none
}

// variables returns a worker's environment: Lockstep's variables, torchrun's, and TensorFlow's.
func (p *assignment) variables() []string {
	n := strconv.Itoa
	pairs := [][2]string{
		{cluster.EnvJob, p.id},
		{cluster.EnvWorker, n(p.rank)},
		{cluster.EnvWorkers, n(p.world)},
		{cluster.EnvLocalWorker, n(p.local)},
		{cluster.EnvLocalWorkers, n(p.locals)},
		{cluster.EnvEpoch, strconv.FormatUint(uint64(p.epoch), 10)},
		{cluster.EnvNode, n(p.node)},
		{"RANK", n(p.rank)},
		{"WORLD_SIZE", n(p.world)},
		{"LOCAL_RANK", n(p.local)},
		{"LOCAL_WORLD_SIZE", n(p.locals)},
		{"GROUP_RANK", n(p.node)},
		{"GROUP_WORLD_SIZE", n(p.nodes)},
		{"ROLE_NAME", "default"},
		{"ROLE_RANK", n(p.rank)},
		{"ROLE_WORLD_SIZE", n(p.world)},
		{"MASTER_ADDR", p.masterAddr},
		{"MASTER_PORT", n(p.masterPort)},
		{"TORCHELASTIC_RUN_ID", p.id},
		{"TORCHELASTIC_RESTART_COUNT", strconv.FormatUint(uint64(p.epoch), 10)},
		{"TORCHELASTIC_MAX_RESTARTS", n(p.restartsMax)},
		{"TF_CONFIG", p.tfConfig()},
	}
	for _, optional := range [][2]string{
		{cluster.EnvStore, p.store},
		{cluster.EnvSecret, p.secret},
		{cluster.EnvRecords, p.record},
		{cluster.EnvNodeFile, p.nodeFile},
		{cluster.EnvTFConfigFile, p.clusterFile},
	} {
		if optional[1] != "" {
			pairs = append(pairs, optional)
		}
	}
	out := make([]string, len(pairs))
	for i, kv := range pairs {
		out[i] = kv[0] + "=" + kv[1]
	}
	return out
}

// tfConfig returns the cluster as TF_CONFIG: all workers are tasks of the job "worker", and task 0 is the
// chief.
func (p *assignment) tfConfig() string {
	var c struct {
		Cluster any `json:"cluster"`
		Task    struct {
			Type  string `json:"type"`
			Index int    `json:"index"`
		} `json:"task"`
	}
	if c.Cluster = p.clusterSpec(); p.clusterFile != "" {
		c.Cluster = cluster.TFConfigClusterInFile
	}
	c.Task.Type, c.Task.Index = "worker", p.rank
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and ints
	}
	return string(text)
}

func (p *assignment) clusterSpec() map[string][]string {
	return map[string][]string{"worker": p.addresses}
}

// tfConfigMax is the most bytes of TF_CONFIG in the environment: Linux limits a variable, with its name and a zero
// byte, to 128 KiB.
const tfConfigMax = 128<<10 - len("TF_CONFIG=") - 1

// clusterFile writes TF_CONFIG's cluster to a file if it is too long for the environment. It returns the file's name,
// or "", and the folder to remove.
func (l *layout) clusterFile() (name, folder string, err error) {
	p := l.assign(0)
	p.rank = p.world // the longest one
	if len(p.tfConfig()) <= tfConfigMax {
		return "", "", nil
	}
	text, err := json.Marshal(map[string]any{"cluster": p.clusterSpec()})
	if err != nil {
		return "", "", err
	}
	if folder, err = os.MkdirTemp("", recordsPrefix+"cluster-*"); err != nil {
		return "", "", err
	}
	name = filepath.Join(folder, "tf_config.json")
	return name, folder, os.WriteFile(name, text, 0o600)
}

// stale are variables of this process that would contradict a worker's own.
var stale = []string{
	cluster.EnvStore, cluster.EnvSecret, cluster.EnvSecretFile, cluster.EnvRecords, cluster.EnvNodeFile,
	cluster.EnvTFConfigFile,
	"TORCHELASTIC_USE_AGENT_STORE", // torchrun's own store does not exist here
}

// SetByAgent reports whether an agent sets or removes this variable of the workers' environment itself: a
// user's value has no effect.
func SetByAgent(name string) bool {
	p := assignment{store: "-", secret: "-", record: "-", nodeFile: "-"}
	return slices.Contains(stale, name) || slices.ContainsFunc(p.variables(),
		func(kv string) bool { return nameOf(kv) == name })
}

// environment returns base without stale variables, overridden by set, and with the defaults that base lacks.
func environment(base, set, defaults []string) []string {
	over := map[string]bool{}
	for _, name := range stale {
		over[name] = true
	}
	for _, kv := range set {
		over[nameOf(kv)] = true
	}
	var out []string
	has := map[string]bool{}
	for _, kv := range base {
		if !over[nameOf(kv)] {
			out = append(out, kv)
			has[nameOf(kv)] = true
		}
	}
	for _, kv := range defaults {
		if !has[nameOf(kv)] && !over[nameOf(kv)] {
			out = append(out, kv)
		}
	}
	return append(out, set...)
}

func nameOf(kv string) string {
	name, _, _ := strings.Cut(kv, "=")
	return name
}

// threads returns the variables by which common runtimes limit their threads. A user's value takes
// precedence.
func threads(n int) []string {
	return []string{"GOMAXPROCS=" + strconv.Itoa(n), "OMP_NUM_THREADS=" + strconv.Itoa(n)}
}
