package packing

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Config configures a [Reducer]. All fields but Options.Timeout must be equal on all ranks.
type Config struct {
	// Reduce is the reduction. With Mean, tensors of integers, which have no true mean, are summed: the
	// caller divides.
	Reduce collective.ReduceOp
	// BytesPerPack is the size at which packs are closed, as in [GroupBySize]; [OnePack]: one pack of each dtype; 0: by
	// [MemoryCosts], [SharedCosts] or [MessageCosts], as the communicator's transport is.
	BytesPerPack int
	// Options apply to every call.
	Options collective.Options
	// Op, if it is not 0, says what happens to the tensors that have an owner: with ReduceScatter only the owner gets the
	// result; with AllGather nothing is combined, and every rank gets the owner's tensor. One call moves those of a pack,
	// and another one all-reduces those without an owner.
	Op collective.Op
	// Owners has, with Op, each tensor's owner: a rank, or -1 for none.
	Owners []int
}

// Reducer all-reduces one list of tensors repeatedly, pack by pack. It belongs to one rank, and one goroutine
// at a time may use it. Every rank makes a Reducer of an equal list and uses it in the same order.
type Reducer struct {
	comm    collective.Communicator
	tensors []Tensor
	owners  []int // nil: none
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
	if err := cfg.checkOwners(comm.Size(), tensors); err != nil {
		return nil, err
	}
	r := &Reducer{comm: comm, tensors: tensors, owners: cfg.Owners}
	if cfg.BytesPerPack == 0 {
		cfg.BytesPerPack = costsOf(comm.Properties()).BytesPerPack(bytesOf(tensors))
	}
	r.packs = splitByOwner(Plan(tensors, cfg.BytesPerPack), tensors, cfg.Owners)
	r.runs = make([]run, len(r.packs))
	for k := range r.packs {
		r.runs[k].call = r.newCall(k, cfg)
	}
	return r, nil
}

// checkOwners validates Op and Owners.
func (c *Config) checkOwners(size int, tensors []Tensor) error {
	switch c.Op {
	case 0:
		if c.Owners != nil {
			return errors.New("packing: the call has Owners but no Op: set Op to ReduceScatter or AllGather")
		}
		return nil
	case collective.ReduceScatter, collective.AllGather:
	default:
		return fmt.Errorf("packing: operation %v for tensors with owners: want ReduceScatter or AllGather", c.Op)
	}
	if len(c.Owners) != len(tensors) {
		return fmt.Errorf("packing: %d owners for %d tensors", len(c.Owners), len(tensors))
	}
	for i, owner := range c.Owners {
		if owner < -1 || owner >= size {
			return fmt.Errorf("packing: %s: owner %d of %d ranks", describe(i, &tensors[i]), owner, size)
		}
	}
	return nil
}

// splitByOwner sorts the tensors of each pack by owner, and makes a separate pack of those without one.
func splitByOwner(packs []Pack, tensors []Tensor, owners []int) (out []Pack) {
	if owners == nil {
		return packs
	}
	for _, p := range packs {
		slices.SortStableFunc(p.Tensors, func(a, b int) int { return owners[a] - owners[b] })
		common := slices.IndexFunc(p.Tensors, func(i int) bool { return owners[i] >= 0 })
		if common < 0 {
			common = len(p.Tensors)
		}
		for _, list := range [][]int{p.Tensors[common:], p.Tensors[:common]} {
			if len(list) == 0 {
				continue
			}
			part := Pack{Type: p.Type, Tensors: list}
			for _, i := range list {
				part.Count += tensors[i].Count
			}
			out = append(out, part)
		}
	}
	return out
}

// owned reports whether the tensors of a pack have owners.
func (r *Reducer) owned(k int) bool { return r.owners != nil && r.owners[r.packs[k].Tensors[0]] >= 0 }

// costsOf returns the approximate costs of a communicator's calls.
func costsOf(p collective.Properties) Costs {
	switch {
	case !p.Memory:
		return MessageCosts
	case p.Transport == "mem":
		return MemoryCosts
	}
	return SharedCosts
}

func bytesOf(tensors []Tensor) (total int) {
	for i := range tensors {
		total += tensors[i].bytes()
	}
	return total
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
	if r.owned(k) {
		call.Op, call.Counts = cfg.Op, make([]int, r.comm.Size())
		own := 0
		for _, i := range p.Tensors {
			call.Counts[r.owners[i]] += r.tensors[i].Count
			if r.owners[i] == r.comm.Rank() {
				own++
			}
		}
		if cfg.Op == collective.AllGather {
			call.SrcList = call.SrcList[:own]
		} else {
			call.DstList = call.DstList[:own]
		}
		return call
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
		if r.owned(k) {
			text += fmt.Sprintf(" of rank %d", r.owners[i])
		}
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
	return r.StartBetween(ctx, dst, src, nil, nil)
}

// StartBetween is Start with a function that is called before the first pack is reduced, and one that is called after
// the last one, as Before and After of [collective.Call]. Either may be nil.
func (r *Reducer) StartBetween(
	ctx context.Context, dst, src []tensor.Memory, before func(context.Context) error, after func(),
) error {
	if err := r.begin(dst, src); err != nil {
		return err
	}
	if n := len(r.runs); n > 0 {
		r.runs[0].call.Before, r.runs[n-1].call.After = before, after
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
	for k := range r.runs {
		call := &r.runs[k].call
		call.Before, call.After = nil, nil
		own := 0
		for j, i := range r.packs[k].Tensors {
			from, to, gives, gets := j, j, true, true
			if r.owned(k) {
				mine := r.owners[i] == r.comm.Rank()
				if call.Op == collective.AllGather {
					from, gives = own, mine
				} else {
					to, gets = own, mine
				}
				if mine {
					own++
				}
			}
			if err := r.checkMemory(i, dst[i], src[i], gives, gets); err != nil {
				return err
			}
			if gives {
				call.SrcList[from] = src[i]
			}
			if gets {
				call.DstList[to] = dst[i]
			}
		}
	}
	r.started, r.waited, r.err = 0, 0, nil
	return nil
}

// checkMemory validates the memories of a tensor that this rank contributes, or gets.
func (r *Reducer) checkMemory(i int, dst, src tensor.Memory, gives, gets bool) error {
	n := r.tensors[i].bytes()
	switch {
	case gives && src.Bytes != n || gets && dst.Bytes != n:
		return fmt.Errorf("packing: %s has %d bytes; its source has %d and its destination %d", describe(i, &r.tensors[i]),
			n, src.Bytes, dst.Bytes)
	case gives && src.Kind == tensor.Device || gets && dst.Kind == tensor.Device:
		return fmt.Errorf("packing: %s is in device memory: want host memory", describe(i, &r.tensors[i]))
	}
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
