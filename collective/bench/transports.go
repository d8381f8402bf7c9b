package bench

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// Transport is a way to connect the ranks of a measurement.
type Transport struct {
	About   string                               // a short description
	frames  bool                                 // no memory is shared between processes
	buffers string                               // the default of Options.Buffers
	here    func(ranks int) []transport.Endpoint // connects the ranks of this process; nil: they are processes
	lacks   func() string                        // the reason why it cannot be used here; nil or empty: it can

	// join connects the ranks of one process with those of the others, through the parent process.
	join func(ctx context.Context, j *job, parent io.ReadWriter) ([]transport.Endpoint, error)
}

// processes returns how many processes the ranks use by default.
func (t *Transport) processes(ranks int) int {
	if t.here != nil {
		return 1
	}
	return ranks
}

// Transports are the transports that can be measured, by name. The processes of a transport between processes
// may have several ranks each; those access each other's memory.
var Transports = map[string]*Transport{
	"mem": {About: "goroutines of one process that reach each other's memory", buffers: "shared", here: mem.New},
	"pipe": {
		About: "goroutines of one process that exchange frames", frames: true, buffers: "ordinary",
		here: mem.NewPipes,
	},
	"shm": {About: "processes that share memory", buffers: "shared", lacks: noSharedMemory, join: joinShared},
	"tcp": {
		About: "processes that exchange frames over loopback sockets", frames: true, buffers: "ordinary",
		join: joinTCP,
	},
}

// Goroutines reports whether it connects goroutines of one process rather than processes.
func (t *Transport) Goroutines() bool { return t.here != nil }

// lack returns why the transport cannot be used here, or "".
func (t *Transport) lack() string {
	if t.lacks == nil {
		return ""
	}
	return t.lacks()
}

func noSharedMemory() string {
	if shm.HostID() == "" {
		return "processes cannot share memory here"
	}
	return ""
}

func joinShared(ctx context.Context, j *job, parent io.ReadWriter) ([]transport.Endpoint, error) {
	if _, err := mixed.Through(parent)(ctx, nil); err != nil { // the parent waits for every process
		return nil, err
	}
	return shm.Open(ctx, shm.Config{Name: j.Name, Job: "bench", Size: j.Options.Ranks, Ranks: j.ranks()})
}

func joinTCP(ctx context.Context, j *job, parent io.ReadWriter) ([]transport.Endpoint, error) {
	cfg := mixed.Config{
		Ranks: j.ranks(), Size: j.Options.Ranks, Exchange: mixed.Through(parent),
		NoSharedMemory: true, TCP: tcp.Config{Job: "bench"},
	}
	if j.Options.TLS {
		s, err := secret.Parse(j.Secret)
		if err == nil {
			cfg.TCP.TLS, err = s.TLS(cfg.TCP.Job, 0)
		}
		if err != nil {
			return nil, fmt.Errorf("bench: TLS: %w", err)
		}
		cfg.TCP.Authenticate = s.Authenticate(secret.Group, cfg.TCP.Job, 0)
		cfg.Apart = strconv.Itoa(j.Process) // connections within a host are not encrypted
	}
	if at := j.Options.Listen; len(at) > 0 {
		cfg.TCP.Listen, cfg.Apart = at[j.Process], fmt.Sprint("host ", j.Process)
	}
	return mixed.Open(ctx, cfg)
}

// config returns the communicator's configuration.
func (o *Options) config() collective.Config {
	return collective.Config{Name: "bench", Algorithm: o.Algorithm, Chooser: o.Table}
}

// openHere makes the communicators of all ranks in this process.
func openHere(o Options) (collective.Group, error) {
	return collective.Open(Transports[o.Transport].here(o.Ranks), o.config())
}
