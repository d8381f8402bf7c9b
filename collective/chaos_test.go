package collective_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var programsFlag = flag.Int("programs", 0, "how many random programs the chaos tests run; 0: some")

// chaosProgram is a random program: the placement of its ranks, their calls, and a fault. The seed determines all of
// it.
type chaosProgram struct {
	seed    uint64
	places  []transport.Place
	row     string // of plan.Algorithms, used where it fits; empty: the chooser's
	steps   []chaosStep
	fault   *simnet.Fault // nil: no fault
	leave   bool          // a process closes when it has done its part, else when all have
	hurried bool          // deadlines are of real time
	victims []int         // the ranks whose fault it is
}

// chaosStep is a step of the program: an operation of all ranks, of two, or of the parts of a split.
type chaosStep struct {
	call  *exampleCall
	start bool // it is started, and awaited at the end

	barrier bool

	from, to int // from sends the source of call to to; -1: this is not a send

	colors int              // > 0: a split by rank modulo colors
	inner  [][]*exampleCall // by color
}

// newChaos draws a program of at most a number of ranks.
func newChaos(seed uint64, ranksMax int) *chaosProgram {
	random := rand.New(rand.NewPCG(seed, 3))
	p := &chaosProgram{seed: seed, leave: random.IntN(2) == 0}
	p.places = chaosPlaces(random, ranksMax)
	if random.IntN(2) == 0 {
		p.row = plan.Algorithms[random.IntN(len(plan.Algorithms))].Name
	}
	for range 1 + random.IntN(10) {
		p.steps = append(p.steps, newChaosStep(random, len(p.places)))
	}
	if len(p.places) > 1 && random.IntN(5) > 0 {
		p.fault = chaosFault(random, len(p.places))
		p.victims = []int{p.fault.Rank}
		switch p.fault.Kind {
		case simnet.Kill, simnet.Stop:
			p.victims = p.processOf(p.fault.Rank)
		case simnet.Cut, simnet.Corrupt, simnet.Forge:
			p.victims = append(p.victims, p.fault.Peer)
		}
	}
	return p
}

// chaosPlaces spreads ranks over hosts and processes.
func chaosPlaces(random *rand.Rand, ranksMax int) []transport.Place {
	hosts, each := 1+random.IntN(4), 1+random.IntN(4)
	places := simnet.Uniform(hosts, each, random.IntN(3) > 0)
	for r := range places { // some processes have two ranks
		if r > 0 && places[r-1].Domain == places[r].Domain && places[r-1].Worker == r-1 && random.IntN(3) == 0 {
			places[r].Worker = r - 1
		}
	}
	return places[:min(len(places), ranksMax)]
}

func newChaosStep(random *rand.Rand, n int) chaosStep {
	s := chaosStep{from: -1}
	most := 100
	if random.IntN(300) == 0 {
		most = 200_000 // several segments; the oracle is slow
	}
	example := func(n int) *exampleCall {
		return newExample(random, collectives[random.IntN(len(collectives))], n, most)
	}
	switch kind := random.IntN(10); {
	case kind == 0:
		s.barrier = true
	case kind == 1 && n > 1:
		s.from = random.IntN(n)
		s.to = (s.from + 1 + random.IntN(n-1)) % n
		s.call = newExample(random, collective.Broadcast, n, most)
	case kind == 2:
		s.colors = 1 + random.IntN(3)
		for color := range min(s.colors, n) {
			var calls []*exampleCall
			for range 1 + random.IntN(2) {
				calls = append(calls, example((n-color+s.colors-1)/s.colors))
			}
			s.inner = append(s.inner, calls)
		}
	default:
		s.call, s.start = example(n), random.IntN(3) == 0
	}
	return s
}

func chaosFault(random *rand.Rand, n int) *simnet.Fault {
	kinds := []simnet.FaultKind{simnet.Kill, simnet.Stop, simnet.Cut, simnet.Delay, simnet.Corrupt, simnet.Forge}
	f := &simnet.Fault{
		At:   time.Duration(random.ExpFloat64() * float64(150*time.Microsecond)),
		Kind: kinds[random.IntN(len(kinds))],
		Rank: random.IntN(n),
		By:   time.Duration(random.IntN(10)) * time.Millisecond,
	}
	f.Peer = (f.Rank + 1 + random.IntN(n-1)) % n
	return f
}

// processOf returns the ranks of a rank's process.
func (p *chaosProgram) processOf(rank int) (ranks []int) {
	for r, at := range p.places {
		if at.Worker == p.places[rank].Worker {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// processes returns the ranks of each process.
func (p *chaosProgram) processes() (out [][]int) {
	for r := range p.places {
		if ranks := p.processOf(r); ranks[0] == r {
			out = append(out, ranks)
		}
	}
	return out
}

func (p *chaosProgram) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d ranks, processes %v, places %v, row %q", len(p.places), p.processes(), p.places, p.row)
	for i, s := range p.steps {
		fmt.Fprintf(&b, "\n%2d ", i)
		switch {
		case s.barrier:
			b.WriteString("barrier")
		case s.from >= 0:
			fmt.Fprintf(&b, "send from %d to %d of %v", s.from, s.to, s.call)
		case s.colors > 0:
			fmt.Fprintf(&b, "split by rank %% %d, then %v", s.colors, s.inner)
		case s.start:
			fmt.Fprintf(&b, "start %v", s.call)
		default:
			fmt.Fprintf(&b, "do %v", s.call)
		}
	}
	if p.fault != nil {
		fmt.Fprintf(&b, "\nfault %+v", *p.fault)
	}
	return b.String()
}

// chaosRank is one rank's run of a program.
type chaosRank struct {
	*chaosProgram
	collective.Communicator
	started []chaosStarted
}

type chaosStarted struct {
	handle collective.Handle
	call   *exampleCall
	rank   int
	src    []byte
	dst    []byte
}

// run executes the program until an error, and awaits what was started. done is the number of called steps.
func (r *chaosRank) run() (done int, err error) {
	for i := range r.steps {
		if err = r.step(&r.steps[i]); err != nil {
			break
		}
		done++
	}
	for _, s := range r.started {
		e := s.check(s.handle.Wait(background))
		if err == nil || errors.Is(e, errWrong) {
			err = e
		}
	}
	if err == nil {
		return done, nil
	}
	if again := r.Do(background, barrier()); !errors.Is(err, errWrong) && (again == nil || again != r.Err()) {
		err = fmt.Errorf("%w: a barrier after %w returned %w", errWrong, err, again)
	}
	return done, err
}

func (r *chaosRank) step(s *chaosStep) error {
	me := r.Rank()
	switch {
	case s.barrier:
		return r.Do(background, barrier())
	case s.from >= 0:
		return r.send(s)
	case s.colors > 0:
		part, err := r.Split(background, me%s.colors, 0)
		if err != nil {
			return err
		}
		for _, c := range s.inner[me%s.colors] {
			if err = chaosCall(part, c); err != nil {
				r.Abort(err) // those of other parts would wait for this rank
				break
			}
		}
		return errors.Join(err, part.Close())
	case !s.start:
		return chaosCall(r.Communicator, s.call)
	}
	x := newChaosStarted(s.call, me)
	var err error
	if x.handle, err = r.Start(background, x.of(s.call)); err == nil {
		r.started = append(r.started, x)
	}
	return err
}

func (r *chaosRank) send(s *chaosStep) error {
	me := r.Rank()
	data := bytes.Clone(s.call.vectors[s.from])
	call := &collective.Call{Op: collective.Send, Type: s.call.dtype, Src: tensor.HostMemory(data), Peer: s.to}
	switch me {
	case s.from:
	case s.to:
		clear(data)
		call.Op, call.Src, call.Dst, call.Peer = collective.Recv, tensor.Memory{}, tensor.HostMemory(data), s.from
	default:
		return nil
	}
	if err := r.Do(background, call); err != nil {
		return err
	}
	if !bytes.Equal(data, s.call.vectors[s.from]) {
		return fmt.Errorf("%w: other bytes received than sent", errWrong)
	}
	clear(data)
	return nil
}

// chaosCall makes a call and checks it.
func chaosCall(c collective.Communicator, example *exampleCall) error {
	x := newChaosStarted(example, c.Rank())
	return x.check(c.Do(background, x.of(example)))
}

func newChaosStarted(c *exampleCall, rank int) chaosStarted {
	src, dst := c.memories(rank, aligned)
	return chaosStarted{call: c, rank: rank, src: src, dst: dst}
}

func (x *chaosStarted) of(c *exampleCall) *collective.Call {
	return &collective.Call{
		Op: c.op, Reduce: c.reduce, Type: c.dtype, Counts: c.counts, Root: c.root,
		Src: tensor.HostMemory(x.src), Dst: tensor.HostMemory(x.dst), Options: &collective.Options{Accumulate: c.accumulate},
	}
}

// check compares the result of a completed call with the oracle, and writes to its memory, which belongs to the rank
// again.
func (x *chaosStarted) check(err error) error {
	c := x.call
	want := c.want[x.rank]
	if err == nil && want != nil && !bytes.Equal(x.dst, want) {
		err = fmt.Errorf("%w of %v: %s", errWrong, c, firstDifference(c.dtype, x.dst, want))
	}
	if !c.inPlace && !bytes.Equal(x.src, c.vectors[x.rank]) {
		err = fmt.Errorf("%w: the source of %v was changed", errWrong, c)
	}
	clear(x.src)
	clear(x.dst)
	return err
}

// chaosKinds lists the errors that survivors may get for each fault.
var chaosKinds = map[simnet.FaultKind][]error{
	simnet.Kill:    {collective.ErrPeerLost},
	simnet.Stop:    {collective.ErrTimeout},
	simnet.Cut:     {collective.ErrPeerLost},
	simnet.Delay:   nil,
	simnet.Corrupt: {collective.ErrPeerLost},
	simnet.Forge:   {collective.ErrMismatch},
}

// judge returns what is wrong with the outcomes of the ranks.
func (p *chaosProgram) judge(errs []error) error {
	for r, err := range errs {
		if err := p.judgeRank(r, err); err != nil {
			return err
		}
	}
	return nil
}

// loses reports whether the fault ends the rank's process: the outcome of that rank does not count.
func (p *chaosProgram) loses(rank int) bool {
	return p.fault != nil && (p.fault.Kind == simnet.Kill || p.fault.Kind == simnet.Stop) &&
		slices.Contains(p.victims, rank)
}

// judgeRank returns what is wrong with the outcome of a rank.
func (p *chaosProgram) judgeRank(r int, err error) error {
	if err == nil || p.loses(r) {
		return nil
	}
	var kinds []error
	if p.fault != nil {
		if kinds = chaosKinds[p.fault.Kind]; kinds != nil && p.splits() {
			// A rank that fails in Split itself never enters the part: there its peers wait for it until the deadline, or until
			// its process ends.
			kinds = append([]error{collective.ErrTimeout, collective.ErrPeerLost}, kinds...)
		}
	}
	switch {
	case errors.Is(err, errWrong) || !slices.ContainsFunc(kinds, func(kind error) bool { return errors.Is(err, kind) }):
		return fmt.Errorf("rank %d: %w", r, err)
	case !p.blames(err):
		return fmt.Errorf("rank %d does not name any of ranks %v: %w", r, p.victims, err)
	}
	return nil
}

// blames reports whether an error names a rank at fault. In a part of a split the ranks have other numbers; in real
// time, a rank of a busy machine may have missed the deadline.
func (p *chaosProgram) blames(err error) bool {
	if p.splits() || p.hurried && p.fault.Kind == simnet.Stop {
		return true
	}
	for _, v := range p.victims {
		if chaosNumber(err.Error(), v) {
			return true
		}
	}
	return false
}

func (p *chaosProgram) splits() bool {
	return slices.ContainsFunc(p.steps, func(s chaosStep) bool { return s.colors > 0 })
}

// chaosNumber reports whether a text contains a number as a separate word.
func chaosNumber(text string, n int) bool {
	return slices.Contains(strings.FieldsFunc(text, func(r rune) bool { return r < '0' || r > '9' }), fmt.Sprint(n))
}

// chaosTally counts, for each fault, the programs in which it occurred before they ended, and in which survivors
// detected it.
type chaosTally map[simnet.FaultKind]int

func (c chaosTally) add(p *chaosProgram, errs []error) {
	for r, err := range errs {
		if err != nil && p.fault != nil && !p.loses(r) {
			c[p.fault.Kind]++
			return
		}
	}
}

// complete reports whether each fault occurred in some program.
func (c chaosTally) complete() bool {
	for kind, errs := range chaosKinds {
		if errs != nil && c[kind] == 0 {
			return false
		}
	}
	return true
}

// check requires that each fault occurred in some of many programs, and logs the numbers.
func (c chaosTally) check(t *testing.T) {
	t.Helper()
	for kind, errs := range chaosKinds {
		if errs != nil && c[kind] == 0 && *programsFlag == 0 && !t.Failed() {
			t.Errorf("the fault %v occurred in no program in time", kind)
		}
	}
	t.Logf("survivors had errors in %v programs", map[simnet.FaultKind]int(c))
}

// chaosSeeds calls run with the requested number of seeds, and stops at the first program that fails. Without a
// requested number it continues until every fault has occurred: of some thousands of seeds, one has no program with a
// certain fault among its first few hundred.
func chaosSeeds(t *testing.T, some, short, ranksMax int, enough func() bool, run func(p *chaosProgram) error) {
	t.Helper()
	count := some
	if testing.Short() {
		count = short
	}
	if *programsFlag > 0 {
		count = *programsFlag
	}
	first := *seedFlag
	if first == 0 {
		first = rand.Uint64() >> 1
	}
	begun, ran := time.Now(), 0
	for ; ran < count || *programsFlag == 0 && ran < 10*count && !enough(); ran++ {
		if p := newChaos(first+uint64(ran), ranksMax); run(p) != nil || t.Failed() {
			return
		}
	}
	t.Logf("%d programs in %v, from seed %d", ran, time.Since(begun).Round(time.Millisecond), first)
}

// chaosFailed reports what is wrong, and how to repeat it.
func chaosFailed(t *testing.T, p *chaosProgram, err error) {
	t.Helper()
	t.Errorf("%v\nrepeat with: go test ./collective -run '^%s$' -programs 1 -seed %d\n%v", err, t.Name(), p.seed, p)
}
