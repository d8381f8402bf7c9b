package run

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/launch"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/monitor"
	"github.com/lockstep-ml/lockstep/internal/redact"
)

// storePort is the default port of an endpoint, that of torchrun.
const storePort = "29400"

// petFlags are the flags that torchrun, and so Kubeflow, sets in environment variables: PET_ and the flag's name.
var petFlags = []string{
	"nnodes", "nproc-per-node", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id",
	"max-restarts", "master-addr", "master-port", "log-dir", "standalone",
}

// setFromEnvironment sets the flags that are not given from their environment variables.
func setFromEnvironment(f *pflag.FlagSet, lookup func(string) (string, bool)) error {
	for _, name := range petFlags {
		variable := "PET_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
		value, ok := lookup(variable)
		if !ok || value == "" || f.Changed(name) {
			continue
		}
		if err := f.Set(name, value); err != nil {
			return cli.Usagef("%s=%s: %v", variable, value, err)
		}
	}
	return nil
}

// countNodes returns the number of nodes.
func (o *runFlags) countNodes() (int, error) {
	if least, most, isRange := strings.Cut(o.nodes, ":"); isRange && least != most {
		return 0, cli.Usagef("--nnodes %s: the number of nodes is fixed, since results depend on the number of replicas: "+
			"want "+"one number, such as --nnodes %s", o.nodes, most)
	}
	n, err := strconv.Atoi(strings.SplitN(o.nodes, ":", 2)[0])
	if err != nil || n < 1 || n > workersMax {
		return 0, cli.Usagef("--nnodes %s: want a number from 1 to %d", o.nodes, workersMax)
	}
	return n, nil
}

// rendezvous returns the rendezvous of the nodes and workers, and adds its part of the agent's configuration.
func (o *runFlags) rendezvous(cfg *launch.Config) (launch.StoreConfig, error) {
	m := launch.StoreConfig{Backend: o.backend, Endpoint: o.endpoint, ID: cfg.ID, Logger: cli.Warnings(o.messages())}
	if slices.Contains([]string{"c10d", "static"}, m.Backend) { // torchrun's
		m.Backend = "tcp"
	}
	if err := o.checkRendezvous(&m, cfg.Nodes); err != nil {
		return m, err
	}
	var err error
	if m.Secret, err = o.secret(cfg.Nodes); err != nil {
		return m, err
	}
	cfg.Node = o.nodeRank
	m.Serve, m.Clients = cfg.Node == 0, cfg.Nodes*(1+cfg.Workers)
	if cfg.Address = o.localAddr; cfg.Address == "" && cfg.Nodes > 1 {
		cfg.Address, err = ownAddress(m)
	}
	return m, err
}

// checkRendezvous validates the rendezvous flags, and fills in the endpoint.
func (o *runFlags) checkRendezvous(m *launch.StoreConfig, nodes int) error {
	if o.masterAddr != "" && m.Endpoint == "" {
		m.Endpoint = o.masterAddr
		if o.masterPort != 0 {
			m.Endpoint = net.JoinHostPort(o.masterAddr, strconv.Itoa(o.masterPort))
		}
	}
	switch {
	case !slices.Contains([]string{"tcp", "file", "etcd"}, m.Backend):
		return cli.Usagef("--rdzv-backend %s: want tcp, file or etcd", o.backend)
	case o.standalone && nodes > 1:
		return cli.Usagef("--standalone is for one node, not for --nnodes %d", nodes)
	case o.nodeRank < 0 || o.nodeRank >= nodes:
		return cli.Usagef("--node-rank %d: want 0 to %d, of --nnodes %d", o.nodeRank, nodes-1, nodes)
	case nodes > 1 && !o.given("node-rank"):
		return cli.Usagef("--nnodes %d: give --node-rank, the number of this node, from 0 to %d", nodes, nodes-1)
	case nodes > 1 && m.Endpoint == "" || m.Backend != "tcp" && m.Endpoint == "":
		return cli.Usagef("--rdzv-endpoint is missing: want %s", map[string]string{
			"tcp": "the address of node 0, such as host1:" + storePort, "file": "a folder that all nodes share",
			"etcd": "etcd's addresses, such as host1:2379",
		}[m.Backend])
	}
	if o.standalone && m.Backend == "tcp" {
		m.Endpoint = ""
	}
	if m.Backend != "file" && strings.Contains(m.Endpoint, "@") {
		return cli.Usagef("--rdzv-endpoint %s: an address has no user and no password; for etcd, set ETCDCTL_USER and "+
			"ETCDCTL_PASSWORD", redact.URL(m.Endpoint))
	}
	if m.Backend == "tcp" && m.Endpoint != "" {
		var err error
		if m.Endpoint, err = withPort(m.Endpoint); err != nil {
			return cli.Usagef("--rdzv-endpoint %s: %v; want host:port", o.endpoint, err)
		}
	}
	return nil
}

// portless reports whether an address has no port.
func portless(endpoint string) bool {
	return strings.Count(endpoint, ":") == 0 || strings.HasSuffix(endpoint, "]")
}

// withPort adds the default port to an address without a port.
func withPort(endpoint string) (string, error) {
	if portless(endpoint) {
		endpoint += ":" + storePort
	}
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil {
		return "", err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || host == "" || n == 0 {
		return "", fmt.Errorf("no host, or no port")
	}
	return endpoint, nil
}

// secret returns the job's secret: the given one, or a new one for a single node. Nodes that are started one by
// one must be given a secret, because they cannot share a new one.
func (o *runFlags) secret(nodes int) (secret.Secret, error) {
	s, given, err := secret.FromEnvironment(os.LookupEnv, cluster.ReadFile)
	switch {
	case err != nil || given:
		return s, err
	case nodes == 1:
		return secret.New(), nil
	case o.plaintext:
		return secret.Secret{}, nil
	}
	return s, cli.Usagef(`several nodes need a secret, and none is set. Do one of these:
  give all nodes the same secret: LOCKSTEP_SECRET=$(openssl rand -hex 32), or LOCKSTEP_SECRET_FILE, a file that
  contains it (-H does this itself);
  or, on an isolated and trusted network, give --data-plaintext: nothing is encrypted, no process authenticates`)
}

// ownAddress returns the address at which other nodes reach this one: that of the interface on the route to the
// endpoint.
func ownAddress(m launch.StoreConfig) (string, error) {
	endpoint := m.Endpoint
	switch m.Backend {
	case "file":
		host, err := os.Hostname()
		if err != nil {
			return "", err
		}
		endpoint = host + ":9"
	case "etcd":
		endpoint, _, _ = strings.Cut(endpoint, ",")
	}
	address, err := rendezvous.RouteTo(context.Background(), endpoint)
	if err != nil {
		return "", fmt.Errorf("%w; give --local-addr, the address at which other nodes reach this one", err)
	}
	return address.String(), nil
}

// environment returns the environment of the workers: for one node that of this process, with -H the forwarded
// variables.
func (o *runFlags) environment() ([]string, error) {
	var out []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if o.hosts == "" || slices.ContainsFunc(forwarded, func(p string) bool { return strings.HasPrefix(name, p) }) {
			out = append(out, kv)
		}
	}
	for _, kv := range o.env {
		name, _, full := strings.Cut(kv, "=")
		value, ok := os.LookupEnv(name)
		switch {
		case name == "":
			return nil, cli.Usagef("--env %s: want NAME=VALUE or NAME", kv)
		case name == cluster.EnvSecret || name == cluster.EnvSecretFile:
			return nil, cli.Usagef("--env %s: lockstep run passes the job's secret to the workers itself: set %s, or %s for a "+
				"file, in its "+
				"own environment instead", name, cluster.EnvSecret, cluster.EnvSecretFile)
		case launch.SetByAgent(name):
			return nil, cli.Usagef("--env %s: lockstep run sets %s for each worker itself: leave it out", kv, name)
		case full:
			out = append(out, kv)
		case !ok:
			return nil, cli.Usagef("--env %s: it is not set here", kv)
		default:
			out = append(out, name+"="+value)
		}
	}
	return out, nil
}

// forwarded are the prefixes of the variables that -H forwards to the workers of all hosts.
var forwarded = []string{"LOCKSTEP_", "OMP_", "NCCL_", "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK"}

// runHosts starts an agent on each host.
func (o *runFlags) runHosts(ctx context.Context, cfg launch.Config, watched *monitor.Service) error {
	for _, flag := range []string{
		"nnodes", "node-rank", "standalone", "rdzv-backend", "local-addr", "data-plaintext",
		"master-addr", "master-port",
	} {
		if o.given(flag) {
			return cli.Usagef("--%s cannot be combined with -H, which sets it", flag)
		}
	}
	hosts, err := launch.ParseHosts(o.hosts, cfg.Workers)
	if err != nil {
		return cli.Usagef("-H: %v", err)
	}
	all := 0
	for _, h := range hosts {
		all += h.Workers
	}
	if err := o.checkRanks(cfg.Show, all); err != nil {
		return err
	}
	if cfg.Logs != "" {
		if cfg.Logs, err = filepath.Abs(cfg.Logs); err != nil {
			return err
		}
	}
	endpoint := o.endpoint
	if endpoint != "" && portless(endpoint) {
		endpoint += ":0" // any free port: the agents receive the address
	}
	r := &launch.Remote{
		Config: cfg, Hosts: hosts, SSH: o.sshCommand(), Address: endpoint,
		Logger: cli.Warnings(o.messages()),
		Watch:  func(ctx context.Context, s rendezvous.Store) { monitor.Follow(ctx, s, cfg.ID, o.tracker) },
	}
	defer watched.Close()
	if r.Config.Dir, err = os.Getwd(); err != nil {
		return err
	}
	if r.Agent, err = cli.OwnCommand(agentCommand); err != nil {
		return err
	}
	r.Config.Command = pathOfOwn(r.Config.Command, r.Agent[0])
	if r.Secret, err = o.secret(1); err != nil {
		return err
	}
	defer cli.PassOnSignals(r.Interrupt, o.readers)()
	code, err := r.Run(ctx)
	if err != nil {
		return err
	}
	return cli.EndWith(code)
}

// pathOfOwn returns the command with the path of this executable, if the program is its name without a folder: the
// same path is valid on all hosts, whereas the PATH of a shell that ssh starts often lacks Go's folder of programs.
func pathOfOwn(command []string, own string) []string {
	if strings.ContainsRune(command[0], filepath.Separator) {
		return command
	}
	found, err := exec.LookPath(command[0])
	if err != nil {
		return command
	}
	a, errA := os.Stat(found)
	b, errB := os.Stat(own)
	if errA != nil || errB != nil || !os.SameFile(a, b) {
		return command
	}
	return append([]string{own}, command[1:]...)
}

// sshCommand returns the words of the command that reaches another host.
func (o *runFlags) sshCommand() []string {
	for _, command := range []string{o.ssh, os.Getenv("LOCKSTEP_SSH")} {
		if words := strings.Fields(command); len(words) > 0 {
			return words
		}
	}
	return []string{"ssh", "-o", "BatchMode=yes"} // no terminal to enter a password
}
