package collective_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestRandomPrograms runs a random program of sums, started sums, broadcasts, barriers and parts on all ranks, in real
// time, on fewer and on more processors than ranks, and injects a fault at a random moment. Each call returns the right
// result or an error of the fault's kind, and its memory belongs to its rank afterwards (the race detector checks
// this). No call waits for the deadline, which would be a lost wake-up, and the group that Rebuild makes works.
func TestRandomPrograms(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	programs := 150
	if testing.Short() {
		programs = 30
	}
	eachMode(t, func(t *testing.T, m mode) {
		random := seeded(t)
		for range programs {
			runtime.GOMAXPROCS([]int{1, 2, 8}[random.IntN(3)])
			p := newProgram(random)
			p.run(t, m)
			if t.Failed() {
				t.Fatalf("%+v", p)
			}
		}
	})
}

type program struct {
	Ranks  int
	Calls  []randomCall
	Fault  fault
	Victim int           // the rank at which it happens
	At     int           // the call before which it happens
	After  time.Duration // or the time
	Seed   uint64        // of the ranks' pauses
}

type randomCall struct {
	Kind  callKind
	Count int
	Root  int
}

type callKind int

const (
	sumCall callKind = iota
	startCall
	broadcastCall
	barrierCall
	partCall
	callKinds
)

type fault string

// faults are the injected faults, with the kinds of errors that each may cause.
var faults = map[fault][]error{
	"none":     nil,
	"cancel":   {context.Canceled, collective.ErrAborted},
	"abort":    {collective.ErrAborted},
	"close":    {collective.ErrClosed, collective.ErrPeerLost},
	"leave":    {collective.ErrPeerLost},
	"mismatch": {collective.ErrMismatch},
}

func newProgram(random *rand.Rand) program {
	p := program{
		Ranks: 1 + random.IntN(9),
		After: time.Duration(random.IntN(300)) * time.Microsecond,
		Seed:  random.Uint64(),
	}
	for range 1 + random.IntN(20) {
		c := randomCall{Kind: callKind(random.IntN(int(callKinds))), Count: random.IntN(200), Root: random.IntN(p.Ranks)}
		if random.IntN(20) == 0 {
			c.Count = 60_000 + random.IntN(80_000) // several segments
		}
		p.Calls = append(p.Calls, c)
	}
	p.Victim, p.At = random.IntN(p.Ranks), random.IntN(len(p.Calls))
	names := []fault{"none", "cancel", "abort", "close", "leave", "mismatch"}
	p.Fault = names[random.IntN(len(names))]
	return p
}

func (p *program) run(t *testing.T, m mode) {
	g := m.open(t, p.Ranks, collective.Config{Timeout: time.Minute, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	happened := make(chan struct{})
	time.AfterFunc(p.After, func() {
		defer close(happened)
		switch c := g.Local()[p.Victim]; p.Fault {
		case "cancel":
			cancel()
		case "abort":
			c.Abort(errors.New("enough"))
		case "close":
			c.Close()
		}
	})
	errs := each(g, func(c collective.Communicator) error {
		r := &programRank{
			program: p, Communicator: c, ctx: background, random: rand.New(rand.NewPCG(p.Seed, uint64(c.Rank()))),
		}
		if c.Rank() == p.Victim {
			r.ctx = ctx
		}
		return r.run()
	})
	<-happened
	for rank, err := range errs {
		expected := func(kind error) bool { return errors.Is(err, kind) }
		if errors.Is(err, errWrong) || err != nil && !slices.ContainsFunc(faults[p.Fault], expected) {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	next, err := g.Rebuild(background)
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, next)
	mustEach(t, next, func(c collective.Communicator) error { return c.Do(background, barrier()) })
}

// programRank is one rank's run of the program.
type programRank struct {
	*program
	collective.Communicator
	ctx     context.Context
	random  *rand.Rand
	started []startedSum
}

type startedSum struct {
	handle   collective.Handle
	src, dst []float32
	want     float32
}

func (r *programRank) run() (err error) {
	for i := range r.Calls {
		if r.random.IntN(8) == 0 {
			time.Sleep(time.Duration(r.random.IntN(60)) * time.Microsecond)
		}
		if i == r.At && r.Rank() == r.Victim {
			switch r.Fault {
			case "leave":
				return errors.Join(r.await(), r.Close())
			case "mismatch":
				return errors.Join(r.Do(r.ctx, named(barrier(), "odd")), r.await())
			}
		}
		if err = r.call(i); err != nil {
			break
		}
	}
	return errors.Join(err, r.await())
}

func (r *programRank) call(i int) error {
	c := r.Calls[i]
	n := r.Size()
	switch c.Kind {
	case sumCall, startCall:
		s := startedSum{
			src: filled(c.Count, float32(r.Rank()+i)), dst: make([]float32, c.Count), want: float32(n*(n-1)/2 + n*i),
		}
		if c.Kind == startCall {
			var err error
			if s.handle, err = r.Start(r.ctx, r.sum(s.src, s.dst)); err == nil {
				r.started = append(r.started, s)
			}
			return err
		}
		return s.check(r.Do(r.ctx, r.sum(s.src, s.dst)), float32(r.Rank()+i))
	case broadcastCall:
		s := startedSum{dst: filled(c.Count, float32(r.Rank()*100+i)), want: float32(c.Root*100 + i)}
		x := tensor.HostMemory(s.dst)
		call := &collective.Call{Op: collective.Broadcast, Root: c.Root, Type: tensor.Float32, Src: x, Dst: x}
		return s.check(r.Do(r.ctx, call), 0)
	case barrierCall:
		return r.Do(r.ctx, barrier())
	}
	part, err := r.Split(r.ctx, r.Rank()%(1+c.Root), -r.Rank())
	if err != nil {
		return err
	}
	s := startedSum{dst: filled(c.Count, 1), want: float32(part.Size())}
	if err = s.check(part.Do(r.ctx, sum(s.dst, s.dst)), 0); err != nil {
		r.Abort(err) // those of other parts would wait for this rank
	}
	return errors.Join(err, part.Close())
}

// sum returns a call whose memories are often lists.
func (r *programRank) sum(src, dst []float32) *collective.Call {
	call := sum(src, dst)
	if r.random.IntN(2) == 0 {
		at := r.random.IntN(len(src) + 1)
		call.SrcList = []tensor.Memory{tensor.HostMemory(src[:at]), tensor.HostMemory(src[at:])}
		at = r.random.IntN(len(dst) + 1)
		call.DstList = []tensor.Memory{tensor.HostMemory(dst[:at]), tensor.HostMemory(dst[at:])}
	}
	return call
}

// await awaits all started calls.
func (r *programRank) await() error {
	var errs []error
	for _, s := range r.started {
		errs = append(errs, s.check(s.handle.Wait(background), 0))
	}
	r.started = nil
	return errors.Join(errs...)
}

var errWrong = errors.New("wrong result")

// check compares a sum with the expected one, and writes to its memory, which belongs to the rank again. src is the
// expected value of the source's elements, 0 if it is unknown.
func (s *startedSum) check(err error, src float32) error {
	for i, x := range s.dst {
		if err == nil && x != s.want {
			err = fmt.Errorf("%w: element %d is %v, want %v", errWrong, i, x, s.want)
		}
	}
	for i, x := range s.src {
		if src != 0 && x != src {
			err = fmt.Errorf("%w: element %d of the source became %v", errWrong, i, x)
		}
	}
	clear(s.src)
	clear(s.dst)
	return err
}

func filled(n int, x float32) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = x
	}
	return out
}
