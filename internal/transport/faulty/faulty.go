// Package faulty wraps endpoints of any transport and injects faults: late calls, lost peers, killed or stopped
// processes, damaged, repeated or truncated frames. A seed determines the fault of each call, so the same calls get the
// same faults. It is for tests of the layers above a transport. Package simnet injects faults at given times.
package faulty

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// Fault is a kind of fault of a call.
type Fault uint8

// The faults.
const (
	Delay    Fault = iota // the call starts up to Config.DelayMax later
	Cut                   // the connection with the peer is lost: a PeerDown with ErrCut, also in all later calls
	Kill                  // the rank's process is killed: its endpoint is closed, and its calls return ErrKilled
	Stop                  // the call waits until its context ends or the endpoint is closed
	Corrupt               // the received frame has a wrong checksum: a PeerDown with transport.ErrCorrupt
	Header                // the received frame has a wrong bit in its header, and a correct checksum
	Replay                // the previous frame is received again before this one
	Truncate              // the frame sent lacks its last byte
	faults
)

// String returns the fault in lower case: "delay".
func (f Fault) String() string {
	names := [...]string{"delay", "cut", "kill", "stop", "corrupt", "header", "replay", "truncate"}
	if f < faults {
		return names[f]
	}
	return fmt.Sprintf("Fault(%d)", uint8(f))
}

// Why calls fail.
var (
	ErrCut    = errors.New("faulty: connection cut")
	ErrKilled = errors.New("faulty: this process was killed")
)

// Config describes the faults.
type Config struct {
	Seed     uint64
	Rate     map[Fault]float64                    // probability of each fault in a call that can have it, 0 to 1
	DelayMax time.Duration                        // default 1 ms
	Once     bool                                 // at most one fault per rank, besides delays
	Note     func(rank int, call string, f Fault) // called for each fault; may be nil
}

// Wrap returns e with faults injected into Exchange, Post, Complete, Signal and Await, and into the groups that are
// split from it.
func Wrap(e transport.Endpoint, cfg Config) transport.Endpoint {
	if cfg.DelayMax == 0 {
		cfg.DelayMax = time.Millisecond
	}
	return &end{
		Endpoint: e, Poster: e.Posts(), SharedMemory: e.Memory(), cfg: cfg,
		random: rand.New(rand.NewPCG(cfg.Seed, uint64(e.Rank()))), closed: make(chan struct{}),
		last: map[int]transport.Header{}, cut: map[int]bool{},
	}
}

// WrapAll wraps all endpoints.
func WrapAll(ends []transport.Endpoint, cfg Config) []transport.Endpoint {
	out := make([]transport.Endpoint, len(ends))
	for i, e := range ends {
		out[i] = Wrap(e, cfg)
	}
	return out
}

// end is a wrapped endpoint.
type end struct {
	transport.Endpoint
	transport.Poster       // nil: it has none
	transport.SharedMemory // nil: it has none
	cfg                    Config

	// Used by the rank's goroutine only.
	random  *rand.Rand
	inspect func(peer int, h transport.Header) error
	last    map[int]transport.Header // received, by sender
	cut     map[int]bool             // connections
	over    bool                     // Config.Once is set, and the fault has been injected
	posted  []call
	waits   int   // the rank whose frame the current call receives, or -1
	spoil   Fault // fault of that frame; faults: none

	mu     sync.Mutex
	killed bool
	shut   bool
	closed chan struct{}
}

// call is a posted exchange.
type call struct {
	to, from int
	in       []byte
	spoil    Fault
}

// draws reports whether the fault is injected into this call.
func (e *end) draws(name string, f Fault) bool {
	rate := e.cfg.Rate[f]
	if rate == 0 || e.over || e.random.Float64() >= rate {
		return false
	}
	e.over = e.cfg.Once && f != Delay
	if e.cfg.Note != nil {
		e.cfg.Note(e.Rank(), name, f)
	}
	return true
}

// strike injects the faults of any call, and returns the error with which the call ends, if any.
func (e *end) strike(name string, peers ...int) error {
	if e.isKilled() {
		return ErrKilled
	}
	if e.draws(name, Delay) {
		time.Sleep(time.Duration(e.random.Int64N(int64(e.cfg.DelayMax))) + 1)
	}
	if e.draws(name, Kill) {
		e.mu.Lock()
		e.killed = true
		e.mu.Unlock()
		if err := e.Close(); err != nil {
			return errors.Join(ErrKilled, err)
		}
		return ErrKilled
	}
	for _, p := range peers {
		if p < 0 || p == e.Rank() {
			continue
		}
		if e.cut[p] || e.draws(name, Cut) {
			e.cut[p] = true
			return &transport.PeerDown{Rank: p, Err: ErrCut}
		}
	}
	return nil
}

// halt is strike for a call that waits.
func (e *end) halt(ctx context.Context, name string, peers ...int) error {
	if err := e.strike(name, peers...); err != nil || !e.draws(name, Stop) {
		return err
	}
	if err := transport.Park(ctx, e.closed); err != nil {
		return err
	}
	return transport.ErrClosed
}

func (e *end) isKilled() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.killed
}

// begin injects the faults of sent frames into an exchange, and returns it.
func (e *end) begin(name string, to int, out *transport.Frame, from int, in []byte) call {
	c := call{to: to, from: from, in: in, spoil: faults}
	if to >= 0 && len(out.Data) > 0 && e.draws(name, Truncate) {
		out.Data = out.Data[:len(out.Data)-1]
	}
	if from >= 0 {
		_, again := e.last[from]
		switch {
		case e.draws(name, Corrupt):
			c.spoil = Corrupt
		case e.draws(name, Header):
			c.spoil = Header
		case again && e.draws(name, Replay):
			c.spoil = Replay
		}
	}
	return c
}

// ended injects the faults of received frames into a result.
func (e *end) ended(c *call, err error) error {
	e.waits = -1
	if e.isKilled() {
		return ErrKilled
	}
	if err == nil && c.spoil == Corrupt {
		if len(c.in) > 0 {
			c.in[e.random.IntN(len(c.in))] ^= 1 << e.random.IntN(8)
		}
		e.cut[c.from] = true
		return &transport.PeerDown{Rank: c.from, Err: transport.ErrCorrupt}
	}
	return err
}

func (e *end) Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error {
	if err := e.halt(ctx, "Exchange", to, from); err != nil {
		return err
	}
	c := e.begin("Exchange", to, &out, from, in)
	e.waits, e.spoil = from, c.spoil
	return e.ended(&c, e.Endpoint.Exchange(ctx, to, out, from, in))
}

func (e *end) Inspect(inspect func(peer int, h transport.Header) error) {
	e.inspect = inspect
	e.Endpoint.Inspect(func(peer int, h transport.Header) error {
		if peer == e.waits {
			switch e.spoil {
			case Header:
				h = FlipBit(h, e.random)
			case Replay:
				if err := inspect(peer, e.last[peer]); err != nil {
					return err
				}
			}
			e.last[peer] = h
		}
		return inspect(peer, h)
	})
}

func (e *end) Close() error {
	e.mu.Lock()
	if !e.shut {
		e.shut = true
		close(e.closed)
	}
	e.mu.Unlock()
	return e.Endpoint.Close()
}

func (e *end) Posts() transport.Poster {
	if e.Poster == nil {
		return nil
	}
	return e
}

func (e *end) Memory() transport.SharedMemory {
	if e.SharedMemory == nil {
		return nil
	}
	return e
}

func (e *end) Post(to int, out transport.Frame, from int, in []byte) error {
	if err := e.strike("Post", to, from); err != nil {
		return err
	}
	c := e.begin("Post", to, &out, from, in)
	if err := e.Poster.Post(to, out, from, in); err != nil {
		return err
	}
	e.posted = append(e.posted, c)
	return nil
}

func (e *end) Complete(ctx context.Context) error {
	if len(e.posted) == 0 {
		return e.Poster.Complete(ctx)
	}
	c := e.posted[0]
	e.posted = slices.Delete(e.posted, 0, 1)
	struck := e.halt(ctx, "Complete", c.to, c.from)
	e.waits, e.spoil = c.from, c.spoil
	if struck != nil { // the memory still belongs to the transport
		ended, cancel := context.WithCancelCause(context.Background())
		cancel(struck)
		ctx = ended
	}
	err := e.ended(&c, e.Poster.Complete(ctx))
	if struck != nil {
		return struck
	}
	return err
}

func (e *end) Signal(flag int) error {
	if err := e.strike("Signal"); err != nil {
		return err
	}
	return e.SharedMemory.Signal(flag)
}

func (e *end) Await(ctx context.Context, rank, flag int) error {
	if err := e.halt(ctx, "Await", rank); err != nil {
		return err
	}
	return e.SharedMemory.Await(ctx, rank, flag)
}

func (e *end) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	if e.isKilled() {
		return nil, ErrKilled
	}
	part, err := e.Endpoint.Split(id, ranks)
	if err != nil {
		return nil, err
	}
	cfg := e.cfg
	cfg.Seed ^= id
	return Wrap(part, cfg), nil
}
