package library

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/tensor"
)

// round is one collective of the local ranks: the last one to arrive executes it for all of them.
type round struct {
	waits   []*wait            // by local rank; nil: it has not arrived
	calls   []*collective.Call // theirs
	arrived int
	running bool
	err     error // valid once done is closed
	done    chan error
}

// together waits until all local ranks have arrived. The last one does the work for all of them.
func (m *rank) together(w *wait) error {
	t := m.team
	t.mu.Lock()
	r := t.rounds[w.Seq()]
	if r == nil {
		n := len(t.members)
		r = &round{waits: make([]*wait, n), calls: make([]*collective.Call, n), done: make(chan error)}
		t.rounds[w.Seq()] = r
	}
	r.waits[m.local], r.calls[m.local] = w, w.Call
	r.arrived++
	if r.arrived == len(t.members) {
		delete(t.rounds, w.Seq())
		r.running = !m.front.Failing()
	}
	run := r.running
	t.mu.Unlock()
	if run {
		if r.err = t.execute(w, r); r.err != nil {
			r.err = m.front.Fail(r.err) // before the others return it
		}
		close(r.done)
		return r.err
	}
	w.missing = func() []int { return t.absent(r) }
	err := w.on(r.done)
	if err == nil {
		return r.err
	}
	t.mu.Lock()
	running := r.running
	t.mu.Unlock()
	if running { // another rank is working in this rank's memory: it has been notified
		<-r.done
		err = r.err
	}
	return err
}

// absent returns the local ranks that have not joined a round.
func (t *team) absent(r *round) (out []int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, w := range r.waits {
		if w == nil {
			out = append(out, t.members[i].rank)
		}
	}
	return out
}

// execute executes a collective of all local ranks.
func (t *team) execute(w *wait, r *round) error {
	t.stage.reset()
	hash, text, same := t.describe(r)
	if len(t.ranks) > 1 {
		if err := t.agree(w, hash, text); err != nil {
			return err
		}
	} else if !same {
		return w.failure(collective.ErrMismatch, errors.New(text))
	}
	return t.move(w, r)
}

// describe returns a hash of the local ranks' call, its description, and whether all of them make it. If their
// calls differ, the description says how, and the hash is one that no other process has.
func (t *team) describe(r *round) (hash uint64, text string, same bool) {
	first := &r.waits[0].print
	hash = first.Header.Sum()
	for i, w := range r.waits[1:] {
		if w.print.Header != first.Header {
			text = fmt.Sprintf("rank %d calls %s, but rank %d calls %s: %s", t.members[0].rank, first,
				t.members[i+1].rank, &w.print, fingerprint.Differ(&w.print, first))
			return hash + uint64(t.driver.Rank())<<32 + 1, text, false
		}
	}
	own, verb := t.ranks[t.driver.Rank()], "call"
	if len(own) == 1 {
		verb = "calls"
	}
	return hash, fmt.Sprintf("%s %s %s", ranges.Text("rank", own), verb, first), true
}

// textMax bounds the description of a process's call that the other processes receive.
const textMax = 512

// agree compares the calls of all processes: they are equal if the minimum of the hashes and the minimum of
// their complements agree.
func (t *team) agree(w *wait, hash uint64, text string) error {
	in, out := t.stage.take(16), t.stage.take(16)
	binary.NativeEndian.PutUint64(in, hash)
	binary.NativeEndian.PutUint64(in[8:], ^hash)
	hashes := Operation{
		Op: collective.AllReduce, Reduce: collective.Min, Type: tensor.Uint64, Src: start(in), Dst: start(out), Count: 2,
	}
	if err := t.run(w, hashes); err != nil {
		return err
	}
	if binary.NativeEndian.Uint64(out) == ^binary.NativeEndian.Uint64(out[8:]) {
		return nil
	}
	n := len(t.ranks)
	in, out = t.stage.take(textMax), t.stage.take(n*textMax)
	clear(in)
	copy(in, text)
	counts := make([]int, n)
	for i := range counts {
		counts[i] = textMax
	}
	texts := Operation{Op: collective.AllGather, Type: tensor.Uint8, Src: start(in), Dst: start(out), In: counts}
	if err := t.run(w, texts); err != nil {
		return err
	}
	var said []string
	for p := range n {
		one, _, _ := strings.Cut(string(out[p*textMax:(p+1)*textMax]), "\x00")
		if p == 0 || one != said[len(said)-1] {
			said = append(said, one)
		}
	}
	return w.failure(collective.ErrMismatch, errors.New(strings.Join(said, "; ")))
}

// run makes the driver execute an operation, and waits for it. If that fails, the library keeps the memory
// of the staging buffer.
func (t *team) run(w *wait, o Operation) error {
	if len(t.ranks) == 1 {
		return errors.New("an operation between processes in a job of one process")
	}
	keep := t.stage
	o.Keep = &keep
	err := w.on(t.driver.Start(o))
	if err != nil {
		t.stage = stage{}
	}
	return w.outcome(err)
}

// stage is the memory in which the library works, reused from call to call.
type stage struct {
	slabs [][]uint64
	used  int
}

// reset frees everything that was taken.
func (s *stage) reset() { s.used = 0 }

// take returns this many bytes of memory, not cleared.
func (s *stage) take(bytes int) []byte {
	words := (bytes + 7) / 8
	if s.used == len(s.slabs) {
		s.slabs = append(s.slabs, nil)
	}
	if slab := s.slabs[s.used]; len(slab) < words || slab == nil {
		s.slabs[s.used] = make([]uint64, max(words, 64))
	}
	slab := s.slabs[s.used]
	s.used++
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(slab))), bytes)
}

func start(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
