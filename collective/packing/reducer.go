package packing

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Config configures a [Reducer]. All fields but Options.Timeout must be equal on all ranks.
type Config struct {
	// Reduce is the reduction. With Mean, tensors of integers, which have no true mean, are summed: the
	// caller divides.
	Reduce collective.ReduceOp
	// BytesPerPack is the size at which packs are closed, as in [GroupBySize]; 0: computed from Costs.
	// [OnePack]: one pack of each dtype.
	BytesPerPack int
	// Costs determine the pack size, and which tensors of a pack are so large that they are reduced in place
	// by a separate call instead of being copied. Default: [MemoryCosts], [SharedCosts] or [MessageCosts], by
	// the communicator's transport.
	Costs Costs
	// Options apply to every call.
	Options collective.Options
}

// Reducer all-reduces one list of tensors repeatedly, pack by pack. It belongs to one rank, and one goroutine
// at a time may use it. Every rank makes a Reducer of an equal list and uses it in the same order.
type Reducer struct {
	comm    collective.Communicator
	tensors []Tensor
	packs   []Pack
	runs    []run
	buffers []tensor.Memory // allocated by the communicator
	memory  bool            // all ranks access each other's memory

	dst, src []tensor.Memory // of the current reduction
	started  int             // packs that were started
	waited   int             // how many of these were awaited
	err      error           // the first failure
}

// run is how one pack is executed: some tensors are contiguous in a buffer, others are reduced in place.
type run struct {
	joined  []int // tensors that are copied into the buffer
	offsets []int // in bytes, of each of joined
	calls   []collective.Call
	of      []int // by call: the tensor that is reduced in place, or -1: the joined tensors
	handles []collective.Handle
	done    bool
}

// NewReducer returns a reducer of tensors over a communicator. It does not own the communicator. The buffers
// for small tensors are allocated by the communicator if it can (NewBuffer), so that peers on the host access
// them in place.
func NewReducer(comm collective.Communicator, tensors []Tensor, cfg Config) (*Reducer, error) {
	for i := range tensors {
		switch t := &tensors[i]; {
		case !t.Type.IsNumeric():
			return nil, fmt.Errorf("packing: %s: a reduction of %v: want a numeric dtype", describe(i, t), t.Type)
		case t.Count < 0:
			return nil, fmt.Errorf("packing: %s: its number of elements is unknown", describe(i, t))
		}
	}
	if cfg.BytesPerPack < 0 {
		return nil, fmt.Errorf("packing: %d bytes per pack: want at least 0", cfg.BytesPerPack)
	}
	r := &Reducer{comm: comm, tensors: tensors, memory: comm.Properties().Memory}
	if cfg.Costs == (Costs{}) {
		switch {
		case !r.memory:
			cfg.Costs = MessageCosts
		case comm.Properties().Transport == "mem":
			cfg.Costs = MemoryCosts
		default:
			cfg.Costs = SharedCosts
		}
	}
	r.packs = Plan(tensors, cfg.bytesPerPack(tensors))
	for k := range r.packs {
		if err := r.layOut(k, cfg); err != nil {
			r.Close()
			return nil, err
		}
	}
	return r, nil
}

func (c *Config) bytesPerPack(tensors []Tensor) int {
	if c.BytesPerPack > 0 {
		return c.BytesPerPack
	}
	total := 0
	for i := range tensors {
		total += tensors[i].bytes()
	}
	return c.Costs.BytesPerPack(total)
}

func describe(i int, t *Tensor) string {
	if t.Name == "" {
		return fmt.Sprintf("tensor %d", i)
	}
	return fmt.Sprintf("tensor %d (%s)", i, t.Name)
}

// layOut decides which tensors of a pack are copied together, and prepares its calls.
func (r *Reducer) layOut(k int, cfg Config) error {
	p := &r.packs[k]
	w := run{}
	bytes, alone := 0, cfg.Costs.aloneBytes()
	for _, i := range p.Tensors {
		if len(p.Tensors) == 1 || r.tensors[i].bytes() >= alone {
			w.of = append(w.of, i)
			continue
		}
		w.joined = append(w.joined, i)
		w.offsets = append(w.offsets, bytes)
		bytes += r.tensors[i].bytes()
	}
	if len(w.joined) == 1 { // there is nothing to join it with
		w.of = append(w.of, w.joined[0])
		w.joined, w.offsets = nil, nil
	}
	if len(w.joined) > 0 {
		w.of = append(w.of, -1)
	}
	reduce := cfg.Reduce
	if reduce == collective.Mean && !p.Type.IsFloat() {
		reduce = collective.Sum
	}
	w.calls = make([]collective.Call, len(w.of))
	w.handles = make([]collective.Handle, len(w.of))
	for c, i := range w.of {
		options := cfg.Options
		call := &w.calls[c]
		*call = collective.Call{Op: collective.AllReduce, Reduce: reduce, Type: p.Type, Options: &options}
		if i >= 0 {
			call.Manifest = &collective.Manifest{Name: r.tensors[i].Name, Shape: r.tensors[i].Shape}
			continue
		}
		call.Manifest = &collective.Manifest{Name: r.label(k, w.joined)}
		buffer, err := r.newBuffer(bytes)
		if err != nil {
			return fmt.Errorf("packing: buffer of pack %d: %w", k, err)
		}
		call.Src, call.Dst = buffer, buffer
	}
	r.runs = append(r.runs, w)
	return nil
}

// label names the tensors of a call: the first ones in words, and a hash of all of them for the check that
// every rank reduces the same tensors.
func (r *Reducer) label(k int, joined []int) string {
	const shown = 3
	var b strings.Builder
	fmt.Fprintf(&b, "pack %d of %d: ", k+1, len(r.packs))
	h := fnv.New64a()
	for n, i := range joined {
		t := &r.tensors[i]
		shape := t.Shape
		if shape == nil {
			shape = []int{t.Count}
		}
		text := fmt.Sprintf("%s %v", t.Name, shape)
		h.Write([]byte(text + "\n"))
		if n < shown {
			if n > 0 {
				b.WriteString(", ")
			}
			b.WriteString(strings.TrimSpace(text))
		}
	}
	if n := len(joined) - shown; n > 0 {
		fmt.Fprintf(&b, " and %d more", n)
	}
	fmt.Fprintf(&b, " (#%016x)", h.Sum64())
	return b.String()
}

// newBuffer allocates memory, from the communicator if it can.
func (r *Reducer) newBuffer(bytes int) (tensor.Memory, error) {
	if a, ok := r.comm.(interface {
		NewBuffer(bytes int) (tensor.Memory, error)
	}); ok {
		m, err := a.NewBuffer(bytes)
		if err == nil {
			r.buffers = append(r.buffers, m)
		}
		return m, err
	}
	words := make([]uint64, (bytes+7)/8)
	if bytes == 0 {
		return tensor.Memory{}, nil
	}
	return tensor.Memory{Ptr: unsafe.Pointer(unsafe.SliceData(words)), Bytes: bytes}, nil
}

// Packs returns the packs in the order in which they are started and complete. The caller must not change
// them.
func (r *Reducer) Packs() []Pack { return r.packs }

// Busy reports whether a reduction is in progress: packs were started that were not awaited.
func (r *Reducer) Busy() bool { return r.waited < r.started }

// Start begins the reduction of src[i] into dst[i], for the tensors i of the list, and returns at once. The
// two memories of a pair are the same or disjoint, and disjoint from those of other ranks. The memory belongs
// to the library until [Reducer.Wait] of its pack has returned. Every Start must be followed by the Wait of
// each pack, or by [Reducer.Finish].
func (r *Reducer) Start(ctx context.Context, dst, src []tensor.Memory) error {
	if err := r.begin(dst, src); err != nil {
		return err
	}
	for k := range r.runs {
		if err := r.start(ctx, k); err != nil {
			r.fail(err)
			return r.Finish(ctx) // which returns that error: it was the first
		}
	}
	return nil
}

// begin records the memory of a reduction.
func (r *Reducer) begin(dst, src []tensor.Memory) error {
	if r.Busy() {
		return errors.New("packing: a reduction is in progress: call Wait for its packs, or Finish")
	}
	if len(dst) != len(r.tensors) || len(src) != len(r.tensors) {
		return fmt.Errorf("packing: %d destinations and %d sources for %d tensors", len(dst), len(src), len(r.tensors))
	}
	for i := range r.tensors {
		if n := r.tensors[i].bytes(); dst[i].Bytes != n || src[i].Bytes != n {
			return fmt.Errorf("packing: %s has %d bytes; its source has %d and its destination %d", describe(i, &r.tensors[i]),
				n, src[i].Bytes, dst[i].Bytes)
		}
		if dst[i].Kind == tensor.Device || src[i].Kind == tensor.Device {
			return fmt.Errorf("packing: %s is in device memory: want host memory", describe(i, &r.tensors[i]))
		}
	}
	r.dst, r.src, r.started, r.waited, r.err = dst, src, 0, 0, nil
	for k := range r.runs {
		r.runs[k].done = false
	}
	return nil
}

// start starts the calls of a pack.
func (r *Reducer) start(ctx context.Context, k int) error {
	w := &r.runs[k]
	r.gather(w)
	r.started++
	for c := range w.calls {
		h, err := r.comm.Start(ctx, &w.calls[c])
		if err != nil {
			return err
		}
		w.handles[c] = h
	}
	return nil
}

// gather sets the memory of a pack's calls, and copies the small tensors into the buffer.
func (r *Reducer) gather(w *run) {
	for c, i := range w.of {
		if i >= 0 {
			w.calls[c].Src, w.calls[c].Dst = r.src[i], r.dst[i]
			continue
		}
		buffer := w.calls[c].Src.HostBytes()
		for j, i := range w.joined {
			copy(buffer[w.offsets[j]:], r.src[i].HostBytes())
		}
	}
}

// scatter copies the small tensors of a pack to their destinations.
func (r *Reducer) scatter(w *run) {
	if len(w.joined) == 0 {
		return
	}
	buffer := w.calls[len(w.calls)-1].Dst.HostBytes()
	for j, i := range w.joined {
		dst := r.dst[i].HostBytes()
		copy(dst, buffer[w.offsets[j]:])
	}
}

// Wait returns when pack k is complete: dst of its tensors holds the results. It returns the first failure of
// any pack of this reduction that has ended: after a failure all later packs fail with the same cause, and
// the contents of every dst are undefined. A pack can be awaited more than once.
func (r *Reducer) Wait(ctx context.Context, k int) error {
	w := &r.runs[k]
	if k >= r.started {
		if r.err == nil {
			return fmt.Errorf("packing: pack %d was not started", k)
		}
		return r.err
	}
	if w.done {
		return r.err
	}
	for c, h := range w.handles {
		if h == nil {
			continue
		}
		w.handles[c] = nil
		if err := h.Wait(ctx); err != nil {
			r.fail(err)
		}
	}
	w.done = true
	r.waited++
	if r.err != nil {
		return r.err
	}
	r.scatter(w)
	return nil
}

func (r *Reducer) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// Finish waits for all packs that were started and not awaited, and returns the reduction's first failure.
func (r *Reducer) Finish(ctx context.Context) error {
	for k := range r.started {
		_ = r.Wait(ctx, k)
	}
	return r.err
}

// Do is Start followed by Finish. Where the ranks access each other's memory, and so do the work themselves,
// it needs no other goroutine.
func (r *Reducer) Do(ctx context.Context, dst, src []tensor.Memory) error {
	if !r.memory {
		if err := r.Start(ctx, dst, src); err != nil {
			return err
		}
		return r.Finish(ctx)
	}
	if err := r.begin(dst, src); err != nil {
		return err
	}
	for k := range r.runs {
		w := &r.runs[k]
		r.gather(w)
		for c := range w.calls {
			if err := r.comm.Do(ctx, &w.calls[c]); err != nil {
				r.fail(err)
				return err
			}
		}
		r.scatter(w)
	}
	return nil
}

// Close releases the buffers. No reduction may be in progress.
func (r *Reducer) Close() {
	for _, m := range r.buffers {
		if m.Owner != nil {
			m.Owner.Release()
		}
	}
	r.buffers = nil
}
