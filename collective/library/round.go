package library

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// round is one collective of the local ranks: the last one to arrive executes it for all of them.
type round struct {
	calls   []*collective.Call // by local rank
	counts  []int
	come    int
	running bool
	err     error // valid once done is closed
	done    chan error
	made    []*member // for a split, by local rank
}

// together waits until all local ranks have arrived. The last one does the work for all of them.
func (m *member) together(w *wait, work func(*round) error, count int) (*round, error) {
	t := m.team
	t.mu.Lock()
	r := t.rounds[w.seq]
	if r == nil {
		n := len(t.members)
		r = &round{calls: make([]*collective.Call, n), counts: make([]int, n), done: make(chan error)}
		t.rounds[w.seq] = r
	}
	r.calls[m.local], r.counts[m.local] = w.call, count
	r.come++
	last := r.come == len(t.members)
	if last {
		delete(t.rounds, w.seq)
		r.running = t.cause() == nil
	}
	run := last && r.running
	t.mu.Unlock()
	if run {
		r.err = work(r)
		close(r.done)
		return r, r.err
	}
	w.missing = func() []int { return t.absent(r) }
	err := w.on(r.done)
	if err == nil {
		return r, r.err
	}
	t.mu.Lock()
	running := r.running
	t.mu.Unlock()
	if running { // another rank is working in this rank's memory: it has been notified
		<-r.done
		err = r.err
	}
	return r, err
}

// absent returns the local ranks that have not joined a round.
func (t *team) absent(r *round) (out []int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, c := range r.calls {
		if c == nil {
			out = append(out, t.members[i].rank)
		}
	}
	return out
}

// collective executes a collective of all local ranks.
func (t *team) collective(w *wait, r *round) error {
	t.stage.reset()
	hash, text := t.print(w, r)
	if len(t.ranks) == 1 {
		if strings.Contains(text, differs) {
			return t.fail(w.failure(collective.ErrMismatch, errors.New(text)), w.m.rank)
		}
		return t.move(w, r)
	}
	if err := t.agree(w, hash, text); err != nil {
		return err
	}
	return t.move(w, r)
}

// differs separates the local ranks' calls in the text of a process whose ranks do not agree.
const differs = ", but "

// print returns a hash of the local ranks' call, and its description. If their calls differ, the hash is one
// that no other process has.
func (t *team) print(w *wait, r *round) (uint64, string) {
	first := t.fingerprint(w.seq, r.calls[0], r.counts[0])
	text := fmt.Sprintf("%s %s", ranksText(t.ranks[t.backend.Rank()]), textOf(r.calls[0], r.counts[0]))
	for i, c := range r.calls[1:] {
		if t.fingerprint(w.seq, c, r.counts[i+1]) != first {
			text = fmt.Sprintf("rank %d calls %s%srank %d calls %s", t.members[0].rank, textOf(r.calls[0], r.counts[0]), differs, t.members[i+1].rank, textOf(c, r.counts[i+1]))
			return first + uint64(t.backend.Rank())<<32 + 1, text
		}
	}
	return first, text
}

func ranksText(ranks []int) string {
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d calls", ranks[0])
	}
	return fmt.Sprintf("ranks %v call", ranks)
}

// textMax bounds the description of a process's call that the other processes receive.
const textMax = 512

// agree compares the calls of all processes: they are equal if the minimum of the hashes and the minimum of
// their complements agree.
func (t *team) agree(w *wait, hash uint64, text string) error {
	in, out := t.stage.take(16), t.stage.take(16)
	binary.NativeEndian.PutUint64(in, hash)
	binary.NativeEndian.PutUint64(in[8:], ^hash)
	err := t.run(w, Operation{Op: collective.AllReduce, Reduce: collective.Min, Type: tensor.Uint64, Src: start(in), Dst: start(out), Count: 2})
	if err != nil {
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
	if err := t.run(w, Operation{Op: collective.AllGather, Type: tensor.Uint8, Src: start(in), Dst: start(out), In: counts}); err != nil {
		return err
	}
	var said []string
	for p := range n {
		one, _, _ := strings.Cut(string(out[p*textMax:(p+1)*textMax]), "\x00")
		if p == 0 || one != said[len(said)-1] {
			said = append(said, one)
		}
	}
	return t.fail(w.failure(collective.ErrMismatch, errors.New(strings.Join(said, "; "))), w.m.rank)
}

// run makes the backend execute an operation, and waits for it. If that fails, the backend keeps the memory
// of the staging buffer.
func (t *team) run(w *wait, o Operation) error {
	if len(t.ranks) == 1 {
		return errors.New("an operation between processes in a job of one process")
	}
	keep := t.stage
	o.Keep = &keep
	err := w.on(t.backend.Start(o))
	if err != nil {
		t.stage = stage{}
	}
	return w.outcome(err)
}

// stage is the memory in which the backend works, reused from call to call.
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
