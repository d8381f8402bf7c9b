package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// processes are this node's workers in an epoch. All calls are made by one goroutine.
type processes struct {
	agent    *Agent
	epoch    uint32
	workers  []*worker // by local number
	ended    chan *worker
	patience atomic.Bool // the workers are exiting in order: their child processes are not killed at once
	memory   memoryKills // before the start
	counted  bool

	clusterFile, clusterFolder string // TF_CONFIG's cluster, if it is too long for the environment, and its folder
}

// launch starts this node's workers.
func (a *Agent) launch(number uint32, l *layout) (*processes, error) {
	n := a.cfg.Workers
	p := &processes{agent: a, epoch: number, ended: make(chan *worker, n)}
	p.memory, p.counted = readMemoryKills(a.root)
	logs, err := a.logFolder(number)
	if err != nil {
		return nil, err
	}
	p.clusterFile, p.clusterFolder, err = l.clusterFile()
	if p.clusterFolder != "" {
		a.guard.add(p.clusterFolder)
	}
	if err != nil {
		p.release()
		return nil, fmt.Errorf("the cluster of TF_CONFIG, which is too long for the environment: %w", err)
	}
	cpus, bound := affinity.Read(), make([][]int, n)
	cores := runtime.GOMAXPROCS(0) // GOMAXPROCS respects the CPU limit of the control group
	nodeFile := a.peers.watchWorkers(number, l.first, n)
	for local := range n {
		bound[local] = cpus.Of(a.cfg.Bind, n, local)
	}
	share := threads(threadShare(cores, bound))
	a.ports.release()
	a.ports = nil
	for local := range n {
		as := l.assign(local)
		as.id, as.epoch, as.restartsMax = a.cfg.ID, number, a.cfg.RestartsMax
		as.store, as.secret, as.record, as.nodeFile = a.cfg.StoreURL, a.cfg.Secret, a.cfg.Records, nodeFile
		as.clusterFile = p.clusterFile
		s := spec{
			command: a.cfg.Command, dir: a.cfg.Dir, cpus: bound[local], logs: logs,
			show:   a.cfg.Show,
			env:    environment(a.cfg.Env, as.variables(), share),
			prefix: fmt.Sprintf("[rank%d] ", as.rank),
			grace:  a.cfg.Grace, unlogged: a.notLogged,
		}
		p.workers = append(p.workers, start(s, as.rank, a.starter, a.guard, &a.screen, &p.patience,
			func(w *worker) { p.ended <- w }))
	}
	if err := logBinding(logs, l, bound); err != nil {
		a.notLogged(err)
	}
	return p, nil
}

// logFolder creates the folder for the logs of an epoch; "": none.
func (a *Agent) logFolder(number uint32) (string, error) {
	if a.cfg.Logs == "" {
		return "", nil
	}
	dir := filepath.Join(a.cfg.Logs, fmt.Sprintf("epoch%d", number))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("folder for logs: %w", err)
	}
	return dir, nil
}

// release removes the file with the cluster: the workers have ended.
func (p *processes) release() {
	if p.clusterFolder != "" {
		os.RemoveAll(p.clusterFolder)
		p.agent.guard.remove(p.clusterFolder)
	}
}

// of returns the worker with a rank.
func (p *processes) of(rank int) *worker { return p.workers[rank-p.workers[0].rank] }

// running calls f for all workers whose process is running.
func (p *processes) running(f func(*worker)) {
	for _, w := range p.workers {
		select {
		case <-w.ended:
		default:
			f(w)
		}
	}
}

// signal sends a signal to all workers.
func (p *processes) signal(sig os.Signal) {
	p.patience.Store(true)
	p.running(func(w *worker) {
		w.signalled = true
		signalGroup(w.pid(), sig)
	})
}

// stop asks all workers to exit.
func (p *processes) stop() {
	p.running(func(w *worker) {
		if stopped(p.agent.root, w.pid()) {
			w.halt()
		}
	})
	p.signal(sigTerminate)
}

func (p *processes) kill() {
	p.patience.Store(false)
	p.running(func(w *worker) {
		w.signalled, w.killed = true, true
		killGroup(w.pid())
	})
}

// suspended returns the processes of the workers, by rank, that were stopped by a signal.
func (p *processes) suspended() stopsSeen {
	pids := map[int]int{}
	p.running(func(w *worker) {
		if suspended(p.agent.root, w.pid()) {
			pids[w.rank] = w.pid()
		}
	})
	return stopsSeen{pids}
}

// exit returns how a worker has ended.
func (p *processes) exit(w *worker) exit {
	if now, ok := readMemoryKills(p.agent.root); ok && p.counted {
		w.memory = memoryKills{now.count - p.memory.count, now.where}
	}
	a := p.agent
	x := exit{signalled: w.signalled, halted: w.halted != nil, started: w.err == nil, seen: a.peers.lastSeen(w.rank)}
	x.Record, x.failed = w.record(a.cfg.Grace)
	x.Job, x.Epoch, x.Host = a.cfg.ID, p.epoch, a.host
	x.clean = w.err == nil && w.ending.code == 0 && !w.signalled
	last, crash := w.tail.lines()
	x.native, x.stderr = nativeCrash(crash) >= 0, last
	if x.halted {
		x.stderr = w.halted // its output after it was continued in order to exit is irrelevant
	}
	return x
}

// gather returns what the workers have published about themselves.
func (p *processes) gather() gathered {
	g := gathered{own: map[int]failure.Record{}, seen: map[int]string{}}
	var records []failure.Record
	records, g.err = failure.Read(p.agent.cfg.Records, p.epoch)
	for _, r := range records {
		g.own[r.Worker] = r
	}
	for _, w := range p.workers {
		g.seen[w.rank] = p.agent.peers.lastSeen(w.rank)
	}
	return g
}
