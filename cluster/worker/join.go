package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/etcd"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/private"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/internal/pause"
	"github.com/lockstep-ml/lockstep/internal/redact"
	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// joined is set when this process joins a job.
var joined atomic.Bool

// Joined reports whether this process has called [Join], with whatever result.
func Joined() bool { return joined.Load() }

// Join makes this process a worker of its job, and waits for all other workers. The error identifies the
// workers at fault: missing after [Config.RendezvousTimeout], joined twice, or different. A job of one worker
// needs no store and opens no port.
func Join(ctx context.Context, cfg Config) (*Worker, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	joined.Store(true)
	w := &Worker{cfg: cfg, job: cfg.Job, secret: cfg.Secret, timeline: timeline.NewRecorder(), session: newSession()}
	w.progress.step.Store(-1)
	w.progress.phaseBegun = make(chan struct{}, 1)
	if w.job.Workers == 1 {
		return w.singleProcess()
	}
	if several := hosts(w.job); several != nil && !cfg.Secret.Given() && !cfg.DataPlaintext {
		return nil, noSecret("the job is spread over " + strings.Join(several, ", "))
	}
	if !cfg.Secret.Given() && (!cfg.DataPlaintext || oneHost(w.job)) {
		if w.secret, err = secret.OfHost(); err != nil {
			return nil, fmt.Errorf("worker: a job without a secret must run as one user on one host, where all processes "+
				"share a key file: %w; or give all workers the same secret (%s)",
				err, cluster.EnvSecret)
		}
	}
	cfg.Logger.Info("worker: joining", "who", w.job.String(), "job", w.job.ID)
	cfg.Logger.Debug("worker: joining by", "epoch", w.job.Epoch, "store", w.storeName(),
		"cpus", affinity.Text(affinity.Allowed()), "read", valuesText(w.job.Values))
	w.Progress(-1, "rendezvous")
	me, launched := w.info() // reads the whole executable, so do it before waiting for others
	ctx, cancel := w.waiting(ctx)
	defer cancel()
	if err := w.join(ctx, me, launched); err != nil {
		return nil, fmt.Errorf("worker: %v: %w", w.job, err)
	}
	w.progress.phase.Store(nil) // the program reports the next phase
	return w, nil
}

func valuesText(values []cluster.Value) string {
	words := make([]string, len(values))
	for i, v := range values {
		words[i] = v.String()
	}
	return strings.Join(words, " ")
}

// singleProcess creates the worker of a single-process job.
func (w *Worker) singleProcess() (*Worker, error) {
	w.members = []Member{{Host: w.hostName(), PID: os.Getpid(), Replicas: w.cfg.Replicas}}
	return w, w.open(mem.New(w.cfg.Replicas))
}

// open creates the group.
func (w *Worker) open(ends []transport.Endpoint) error {
	g, err := collective.Open(ends, w.collective())
	if err != nil {
		for _, e := range ends {
			e.Close()
		}
		return err
	}
	w.world = w.use(g)
	return nil
}

// collective returns the configuration of the communicator.
func (w *Worker) collective() collective.Config {
	c := w.cfg.Collective
	c.Epoch, c.Timeline = w.job.Epoch, w.timeline
	if w.store != nil {
		c.Describe = w.describe
	}
	return c
}

// link creates the group of all workers' replicas.
func (w *Worker) link(ctx context.Context) error {
	if o := w.cfg.Opener; o != nil {
		g, err := o.Open(ctx, w, w.collective())
		if err != nil {
			return err
		}
		if g != nil {
			w.stopListening()
			w.world = w.use(g)
			w.links = w.linksBy(g)
			return nil
		}
	}
	ends, err := w.connect(ctx)
	if err != nil {
		return err
	}
	w.links = w.linksOf(ends[0])
	return w.open(ends)
}

// join joins the rendezvous and connects to the other workers. launched is the launcher's file of this node, which join
// closes unless the member has it; nil: none.
func (w *Worker) join(ctx context.Context, me info, launched *membership.NodeFile) error {
	if err := w.openStore(ctx); err != nil {
		launched.Close()
		return err
	}
	if err := w.register(ctx, me); err != nil {
		w.failRendezvous(err)
		w.keepStore()
		w.closeStore()
		launched.Close()
		return err
	}
	working, stopWork := context.WithCancel(context.Background())
	w.stopWork = stopWork
	err := w.startMonitoring(working, launched)
	if err == nil { // before another worker's failure, of which this may be the cause too, ends the wait
		err = w.checkHosts()
	}
	if err == nil {
		err = w.explain(ctx, w.unlessGone(ctx, "", w.link))
	}
	if err != nil {
		if e := w.Fail(err); e != nil {
			w.cfg.Logger.Warn("worker: reporting this worker's failure to the others failed", "error", e)
		}
		w.publishGone()
		w.leaveFailed()
		w.stop()
	}
	return err
}

// How long the worker that serves the store, or removes it, keeps it after a failed rendezvous: for late
// workers, and at most for workers that have registered and not left yet.
const (
	keepStoreMin = time.Second
	keepStoreMax = 10 * time.Second
)

// keepStore keeps the store for the others, so that they can read why the rendezvous failed.
func (w *Worker) keepStore() {
	if w.server == nil && !w.removes() {
		return
	}
	since := time.Now()
	for pause.For(context.Background(), keepStoreMin); w.server != nil && w.server.Clients() > 0 &&
		time.Since(since) < keepStoreMax; {
		pause.For(context.Background(), keepStoreMin/20)
	}
}

func (w *Worker) closeStore() {
	w.stopListening()
	w.store.Close()
	if w.server != nil {
		w.server.Close()
		w.port.Close()
	}
	if w.removes() {
		folder := filepath.FromSlash(strings.TrimPrefix(w.job.Store, "file://"))
		if err := os.RemoveAll(folder); err != nil {
			w.cfg.Logger.Warn("worker: removing the rendezvous folder failed", "error", err)
		}
	}
}

// storeName returns the store's URL, for display.
func (w *Worker) storeName() string { return redact.URL(w.job.Store) }

// removes reports whether this worker removes the store when all have left.
func (w *Worker) removes() bool {
	return w.job.Worker == 0 && w.job.StoreTemporary && strings.HasPrefix(w.job.Store, "file://")
}

// serves reports whether worker 0 serves the store of a job.
func serves(j *cluster.Job) bool { return !j.Hosted && strings.HasPrefix(j.Store, "tcp://") }

// openStore opens the store, or serves it.
func (w *Worker) openStore(ctx context.Context) error {
	if w.job.Store == cluster.StorePMI {
		if err := w.exchangeStore(ctx); err != nil {
			return err
		}
	}
	cfg := rendezvous.Config{Schemes: etcd.Schemes(), Logger: w.cfg.Logger}
	maps.Copy(cfg.Schemes, w.cfg.Schemes)
	if w.cfg.HeartbeatTimeout > 0 {
		cfg.ReconnectTimeout = w.cfg.HeartbeatTimeout / 2
	}
	if w.cfg.Secret.Given() || serves(w.job) &&
		w.secret.Given() { // a store that a launcher serves has the job's secret, or none
		var err error
		if cfg.TLS, err = w.secret.TLS(w.job.ID, 0); err != nil { // a store outlives epochs
			return err
		}
		cfg.Authenticate = w.secret.Authenticate(secret.Store, w.job.ID, 0)
	}
	if serves(w.job) && w.job.Worker == 0 {
		if err := w.serveStore(ctx, cfg); err != nil {
			return fmt.Errorf("serving the store for the other workers: %w; if the port is taken, or the address is not this "+
				"host's, give the job another store (%s)", err, cluster.EnvStore)
		}
		return nil
	}
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, w.externalAddress(ctx, address))
	}
	if w.job.StoreTemporary {
		if err := w.ownFolder(); err != nil {
			return err
		}
	}
	store, err := rendezvous.Open(ctx, w.job.Store, cfg)
	switch {
	case errors.Is(err, secret.ErrRefused) && !w.cfg.Secret.Given() && cfg.Authenticate != nil && w.cfg.DataPlaintext:
		return fmt.Errorf("worker: %w: the job's addresses or its launcher say that all workers are on this host, "+
			"but worker 0, which serves the store at %s, does not have the key of this user on this host (%s): "+
			"it runs in another container or as another user, or has a secret. Give all workers the same secret (%s): %w",
			ErrNoSecret, w.storeName(), w.hostName(), cluster.EnvSecret, err)
	case errors.Is(err, secret.ErrRefused) && !w.cfg.Secret.Given() && cfg.Authenticate != nil:
		return fmt.Errorf("%w: %w",
			noSecret(fmt.Sprintf("worker 0, which serves the store at %s, does not have the key of this user on this host "+
				"(%s): it runs on another host, "+
				"in another container or as another user, belongs to another job, or has a secret", w.storeName(),
				w.hostName())), err)
	case err != nil && errors.Is(context.Cause(ctx), context.DeadlineExceeded) && serves(w.job):
		why := "it was not started, serves at another address, or does not accept this worker"
		if !w.cfg.Secret.Given() {
			why += ", which has no secret"
		}
		return fmt.Errorf("worker 0, which serves the store at %s, was not reached within %v: %s: %w", w.storeName(),
			w.cfg.RendezvousTimeout, why, err)
	case err != nil:
		return err
	}
	w.store = store
	return nil
}

// ownFolder ensures that the folder of the job's temporary store belongs to this user. On worker 0 it also
// removes the folders of jobs that were killed.
func (w *Worker) ownFolder() error {
	store, ok := strings.CutPrefix(w.job.Store, "file://")
	if !ok {
		return nil
	}
	parent := filepath.Dir(filepath.FromSlash(store))
	if err := private.Make(parent); err != nil {
		return fmt.Errorf("the rendezvous folder of this host's workers: %w; remove it, set TMPDIR or XDG_RUNTIME_DIR to "+
			"a folder that no other user can modify, "+
			"or give the job another store (%s)", err, cluster.EnvStore)
	}
	if w.removes() {
		if err := rendezvous.RemoveUnused(parent, cluster.LauncherGone); err != nil {
			w.cfg.Logger.Warn("worker: removing the folders of earlier jobs failed", "error", err)
		}
	}
	return nil
}

// storeBytes bounds the content of a store that a worker serves, in addition to a share for each worker.
const (
	storeBytes      = 64 << 20
	storeBytesShare = 1 << 20
)

// openPort opens the port that serves the store: all workers may connect at the same moment.
func (w *Worker) openPort(address string) (*listener.Listener, error) {
	return listener.Open(listener.Config{
		Listen: address, Logger: w.cfg.Logger, HalfOpen: max(w.job.Workers, listener.HalfOpenDefault),
	})
}

// serveStore serves the store at this process's port, which the replicas use too.
func (w *Worker) serveStore(ctx context.Context, cfg rendezvous.Config) (err error) {
	if w.port == nil { // else exchangeStore has opened it
		address := w.externalAddress(ctx, strings.TrimPrefix(w.job.Store, "tcp://"))
		if w.port, err = w.openPort(address); err != nil {
			return err
		}
	}
	// The server ends with Close, not with the wait.
	w.server, err = rendezvous.Serve(context.WithoutCancel(ctx), rendezvous.ServerConfig{
		SharedListener: w.port, TLS: cfg.TLS, Authenticate: cfg.Authenticate,
		Bytes: storeBytes + w.job.Workers*storeBytesShare,
	})
	if err != nil {
		w.port.Close()
		return err
	}
	w.store = w.server.Store()
	return nil
}

// externalAddress returns the address of a TCP store as seen from this host. On the host itself, a host's name often
// resolves to a loopback address (127.0.1.1 in /etc/hosts), which other hosts cannot reach. Then the result
// is the address of the default interface, both for the worker that serves the store and for the workers that
// dial it from there. A job that is entirely on one host uses loopback.
func (w *Worker) externalAddress(ctx context.Context, address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "localhost" || net.ParseIP(host) != nil || oneHost(w.job) {
		return address
	}
	found, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil || !net.ParseIP(found[0]).IsLoopback() {
		return address
	}
	ip, err := rendezvous.RouteTo(ctx, address)
	if err != nil {
		return address
	}
	return net.JoinHostPort(ip.String(), port)
}

// info is the Data of a worker's registration.
type info struct {
	Transport mixed.Settings `json:"transport"`
	Folder    string         `json:"folder,omitempty"` // of this user, equal where processes share it; "": none
	Node      *int           `json:"node,omitempty"`   // the launcher's node that reports for this worker; nil: none
	Opener    string         `json:"opener,omitempty"` // the backend of the replicas; "": the library itself

	Platform    string `json:"platform"`
	Executable  string `json:"executable,omitempty"` // "": Config.Build is the whole identity
	MixedBuilds bool   `json:"mixed_builds,omitempty"`
}

// info returns the Data of this worker's registration, and the file of [Worker.openLaunched].
func (w *Worker) info() (me info, launched *membership.NodeFile) {
	me = info{Folder: folderID()}
	me.Node, launched = w.openLaunched()
	if o := w.cfg.Opener; o != nil {
		me.Opener = o.Name
	}
	w.addProgram(&me)
	return me, launched
}

// register listens, registers with the address, and waits for the registrations of the other workers.
func (w *Worker) register(ctx context.Context, me info) error {
	w.registration = rendezvous.Registration{
		Job: w.job.ID, Epoch: w.job.Epoch, Worker: w.job.Worker, Workers: w.job.Workers, Host: w.hostName(),
		PID: os.Getpid(), Replicas: w.cfg.Replicas, Build: w.cfg.Build,
	}
	if err := w.listen(ctx); err != nil {
		if e := rendezvous.Withdraw(ctx, w.store, w.registration, err); e != nil {
			w.cfg.Logger.Warn("worker: reporting to the others that this worker cannot join failed", "error", e)
		}
		return err
	}
	w.registration.Addr, me.Transport = w.listener.Addr(), w.listener.Settings()
	var err error
	if w.registration.Data, err = json.Marshal(me); err != nil {
		return err
	}
	if w.registrations, err = rendezvous.Join(ctx, w.store, w.registration); err != nil {
		return err
	}
	w.store = rendezvous.Fence(w.store, w.job.ID, w.job.Epoch)
	first := 0
	w.infos = decodeInfos(w.registrations)
	for i := range w.registrations {
		c := &w.registrations[i]
		switch {
		case c.Replicas < 1 || c.Replicas > replicasMax:
			return fmt.Errorf("%v registered %d replicas: want 1 to %d", c, c.Replicas, replicasMax)
		case w.infos[i].opener() != w.infos[0].opener():
			return fmt.Errorf("%w: the replicas of %v use %s, and those of %v use %s: want the same collectives on all workers",
				ErrDiffer, &w.registrations[0], w.infos[0].opener(), c, w.infos[i].opener())
		}
		w.members = append(w.members, Member{Worker: i, Host: c.Host, PID: c.PID, First: first, Replicas: c.Replicas})
		first += c.Replicas
	}
	return w.checkPrograms()
}

// hostName returns the name of this worker's host: the launcher's, if it has one.
func (w *Worker) hostName() string {
	if w.job.Host != "" {
		return w.job.Host
	}
	host, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return host
}

// otherHost returns the first worker that is not known to be on this host, or -1.
func (w *Worker) otherHost() int {
	mine := w.hostOf(w.job.Worker)
	for i := range w.registrations {
		if w.hostOf(i) != mine {
			return i
		}
	}
	return -1
}

// hostOf returns the identity of a worker's host, as far as the registration has it.
func (w *Worker) hostOf(worker int) string {
	if id := w.infos[worker].Transport.Host; id != "" {
		return id
	}
	return "host " + w.registrations[worker].Host
}

// checkHosts rejects several hosts without a secret.
func (w *Worker) checkHosts() error {
	other := w.otherHost()
	switch {
	case other < 0, w.cfg.Secret.Given() && !w.cfg.DataPlaintext:
		return nil
	case w.cfg.Secret.Given():
		w.cfg.Logger.Warn("worker: the replicas' traffic is not encrypted, as configured", "with",
			w.registrations[other].String())
		return nil
	}
	low, high := min(other, w.job.Worker), max(other, w.job.Worker)
	why := fmt.Sprintf("%v and %v are on different hosts", &w.registrations[low], &w.registrations[high])
	if apart := shm.WhyApart(w.hostOf(low), w.hostOf(high)); apart != "" {
		why = fmt.Sprintf("%v and %v are on one host, but have %s", &w.registrations[low], &w.registrations[high], apart)
	}
	if !w.cfg.DataPlaintext {
		return noSecret(why)
	}
	w.cfg.Logger.Warn("worker: the job has no secret, so any process that can reach its ports can read and disturb it",
		"why", why)
	return nil
}

// opener names the backend of a worker's replicas.
func (a *info) opener() string {
	if a.Opener == "" {
		return "the library's own collectives"
	}
	return a.Opener
}

// decodedInfo is the decoded Data of a registration, or why it is invalid.
type decodedInfo struct {
	info
	err error
}

// decodeInfos decodes the Data of all registrations, by worker. Those of one host and program are equal, and
// decoded once.
func decodeInfos(registrations []rendezvous.Registration) []decodedInfo {
	known := map[string]decodedInfo{}
	out := make([]decodedInfo, len(registrations))
	for i := range registrations {
		text := string(registrations[i].Data)
		d, ok := known[text]
		if !ok {
			if d.err = json.Unmarshal([]byte(text), &d.info); d.err != nil {
				d.info = info{}
			}
			known[text] = d
		}
		out[i] = d
	}
	return out
}

// listen opens the port at which the other workers reach this one.
func (w *Worker) listen(ctx context.Context) error {
	cfg := mixed.Config{
		Epoch: w.job.Epoch, NoSharedMemory: w.cfg.NoSharedMemory, Apart: w.cfg.Apart,
		TCP: tcp.Config{
			Job: w.job.ID, KeepAlive: w.cfg.keepAlive(), Logger: w.cfg.Logger, Meter: &w.meter.tcp,
		},
	}
	var err error
	if cfg.TCP.Listen, cfg.Advertise, err = w.listenAt(ctx); err != nil {
		return err
	}
	// A store whose address the launcher passes on is at Listen, if that is given.
	if w.port != nil && (w.cfg.Listen == "" || w.cfg.Job.Store == cluster.StorePMI) {
		cfg.TCP.SharedListener = w.port
	}
	if w.secret.Given() { // the processes authenticate each other, and encrypt traffic between hosts
		cfg.TCP.Authenticate = w.secret.Authenticate(secret.Group, w.job.ID, w.job.Epoch)
	}
	if w.cfg.Secret.Given() && !w.cfg.DataPlaintext { // else all are on this host: checkHosts
		if cfg.TCP.TLS, err = w.secret.TLS(w.job.ID, w.job.Epoch); err != nil {
			return err
		}
	}
	w.listener, err = mixed.Listen(cfg)
	if port := w.specPort(); errors.Is(err, syscall.EADDRINUSE) && w.cfg.Ports == "" && port != "0" &&
		cfg.TCP.SharedListener == nil {
		return fmt.Errorf("worker %d listens on port %s, which the cluster's specification (TF_CONFIG) lists for it, "+
			"but another process has it: end that one, list another port, or set Ports: %w", w.job.Worker, port, err)
	}
	return err
}

// stopListening closes the port, unless the replicas use it.
func (w *Worker) stopListening() {
	if w.listener != nil {
		w.listener.Close()
		w.listener = nil
	}
}

// connect connects the replicas of all workers.
func (w *Worker) connect(ctx context.Context) ([]transport.Endpoint, error) {
	last := &w.members[len(w.members)-1]
	g := mixed.Group{Size: last.First + last.Replicas, Self: w.job.Worker, Nonce: w.registrations[0].Nonce}
	for i := range w.members {
		g.Processes = append(g.Processes, mixed.Process{
			Ranks: w.members[i].Ranks(), Addr: w.registrations[i].Addr, Settings: w.infos[i].Transport,
		})
	}
	ends, err := w.listener.Connect(ctx, g)
	w.listener = nil
	if err == nil {
		w.timeline.MeasureLinks(func() [timeline.LinksMax]timeline.Link { return w.meter.read(w.members) })
	}
	return ends, err
}

// listenAt returns the address that this process listens on, and the host for others to dial, if different.
func (w *Worker) listenAt(ctx context.Context) (listen, advertise string, err error) {
	ports := w.cfg.Ports
	if ports == "" {
		ports = w.specPort()
	}
	host := w.cfg.Listen
	if host == "" || net.ParseIP(host).IsUnspecified() {
		ip, err := w.address(ctx)
		if err != nil {
			return "", "", fmt.Errorf("finding the address by which the others reach this host: %w; set Listen", err)
		}
		if host == "" {
			host = ip
		} else {
			advertise = ip
		}
	}
	return net.JoinHostPort(host, ports), advertise, nil
}

// specPort returns the port of this worker in the job's spec, as TF_CONFIG has it: firewalls let it pass. It
// returns "0", any free port, if the spec has none, or if the port is that of the store that this worker
// serves.
func (w *Worker) specPort() string {
	address, err := w.job.Spec.Address(w.job.Task)
	if err != nil || address == "" {
		return "0"
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil || port == "" {
		return "0"
	}
	if w.server != nil {
		if _, served, _ := net.SplitHostPort(w.server.Addr()); served == port {
			return "0"
		}
	}
	return port
}

// address returns this host's address on the route to the store or, if the store has no address, to another host of the
// job's spec.
func (w *Worker) address(ctx context.Context) (string, error) {
	if oneHost(w.job) {
		return "127.0.0.1", nil
	}
	if w.server != nil {
		host, _, err := net.SplitHostPort(w.server.Addr())
		if net.ParseIP(host).IsUnspecified() { // the others dial the address of the store
			host, _, err = net.SplitHostPort(strings.TrimPrefix(w.job.Store, "tcp://"))
		}
		return host, err
	}
	to, known := w.job.Store, hosts(w.job)
	if strings.HasPrefix(to, "file://") {
		if len(known) == 0 {
			return ownAddress(ctx), nil
		}
		mine, _ := w.job.Spec.Address(w.job.Task)
		if to = known[0]; strings.HasPrefix(mine, to+":") || mine == to {
			to = known[1]
		}
		to = net.JoinHostPort(to, "9")
	}
	ip, err := rendezvous.RouteTo(ctx, to)
	if err != nil { // Slurm's name of a node may be unknown to others
		if own := ownAddress(ctx); len(known) == 0 || !net.ParseIP(own).IsLoopback() {
			return own, nil
		}
	}
	return ip.String(), err
}
