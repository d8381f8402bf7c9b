package packing

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strings"

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
	// Costs determine the pack size. Default: [MemoryCosts], [SharedCosts] or [MessageCosts], by the communicator's
	// transport.
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

	started int   // packs of the current reduction that were started
	waited  int   // how many of these were awaited
	err     error // its first failure
}

// run is how one pack is executed: one call, which reads and writes the tensors in place.
type run struct {
	call   collective.Call
	handle collective.Handle // nil: it was awaited
}

// NewReducer returns a reducer of tensors over a communicator. It does not own the communicator.
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
	r := &Reducer{comm: comm, tensors: tensors}
	if cfg.Costs == (Costs{}) {
		switch p := comm.Properties(); {
		case !p.Memory:
			cfg.Costs = MessageCosts
		case p.Transport == "mem":
			cfg.Costs = MemoryCosts
		default:
			cfg.Costs = SharedCosts
		}
	}
	r.packs = Plan(tensors, cfg.bytesPerPack(tensors))
	r.runs = make([]run, len(r.packs))
	for k := range r.packs {
		r.runs[k].call = r.newCall(k, cfg)
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

// newCall returns the call of a pack, without its memory.
func (r *Reducer) newCall(k int, cfg Config) collective.Call {
	p := &r.packs[k]
	call := collective.Call{
		Op: collective.AllReduce, Reduce: cfg.Reduce, Type: p.Type, Options: &cfg.Options,
		SrcList: make([]tensor.Memory, len(p.Tensors)), DstList: make([]tensor.Memory, len(p.Tensors)),
		Manifest: &collective.Manifest{Name: r.label(k)},
	}
	if call.Reduce == collective.Mean && !p.Type.IsFloat() {
		call.Reduce = collective.Sum
	}
	if len(p.Tensors) == 1 {
		only := &r.tensors[p.Tensors[0]]
		call.Manifest = &collective.Manifest{Name: only.Name, Shape: only.Shape}
	}
	return call
}

// label names the tensors of a pack: the first ones in words, and a hash of all of them for the check that
// every rank reduces the same tensors.
func (r *Reducer) label(k int) string {
	const shown = 3
	var b strings.Builder
	fmt.Fprintf(&b, "pack %d of %d: ", k+1, len(r.packs))
	h := fnv.New64a()
	for n, i := range r.packs[k].Tensors {
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
	if n := len(r.packs[k].Tensors) - shown; n > 0 {
		fmt.Fprintf(&b, " and %d more", n)
	}
	fmt.Fprintf(&b, " (#%016x)", h.Sum64())
	return b.String()
}

// Packs returns the packs in the order in which they are started and complete. The caller must not change
// them.
func (r *Reducer) Packs() []Pack { return r.packs }

// Busy reports whether a reduction is in progress: packs were started that were not awaited.
func (r *Reducer) Busy() bool { return r.waited < r.started }

// Start begins the reduction of src[i] into dst[i], for the tensors i of the list, and returns at once. The
// two memories of a pair are the same or disjoint, and disjoint from those of other ranks. The memory, but not the
// lists, belongs to the library until [Reducer.Wait] of its pack has returned. Every Start must be followed by the Wait
// of each pack, or by [Reducer.Finish].
func (r *Reducer) Start(ctx context.Context, dst, src []tensor.Memory) error {
	if err := r.begin(dst, src); err != nil {
		return err
	}
	for k := range r.runs {
		h, err := r.comm.Start(ctx, &r.runs[k].call)
		if err != nil {
			r.fail(err)
			return r.Finish(ctx) // which returns that error: it was the first
		}
		r.runs[k].handle = h
		r.started++
	}
	return nil
}

// begin sets the memory of a reduction.
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
	for k := range r.runs {
		call := &r.runs[k].call
		for j, i := range r.packs[k].Tensors {
			call.SrcList[j], call.DstList[j] = src[i], dst[i]
		}
	}
	r.started, r.waited, r.err = 0, 0, nil
	return nil
}

// Wait returns when pack k is complete: dst of its tensors holds the results. It returns the first failure of
// any pack of this reduction that has ended: after a failure all later packs fail with the same cause, and
// the contents of every dst are undefined. A pack can be awaited more than once.
func (r *Reducer) Wait(ctx context.Context, k int) error {
	if k >= r.started && r.err == nil {
		return fmt.Errorf("packing: pack %d was not started", k)
	}
	if h := r.runs[k].handle; h != nil {
		r.runs[k].handle = nil
		if err := h.Wait(ctx); err != nil {
			r.fail(err)
		}
		r.waited++
	}
	return r.err
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

// Do reduces as Start and Finish do, but needs no other goroutine.
func (r *Reducer) Do(ctx context.Context, dst, src []tensor.Memory) error {
	if err := r.begin(dst, src); err != nil {
		return err
	}
	for k := range r.runs {
		if err := r.comm.Do(ctx, &r.runs[k].call); err != nil {
			r.fail(err)
			return err
		}
	}
	return nil
}
