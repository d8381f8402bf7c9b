package train

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// partialSnapshot is a snapshot in progress of which every worker writes a part in the background. It is complete when
// the chief has written the manifest, after all workers have reported their parts.
type partialSnapshot struct {
	backup   *Backup
	contents *checkpoint.Contents // without tensors
	done     chan struct{}        // this worker's part is written
	result   writtenPart
}

// writtenPart is a worker's message about its part.
type writtenPart struct {
	Part  checkpoint.Part `json:"part"`
	Error string          `json:"error,omitempty"`
	err   error           // of this worker
}

// findWriters decides whether all workers write parts of snapshots: if the optimizer is sharded, and all see the
// chief's folder. holder has locked it.
func (b *Backup) findWriters(ctx context.Context, holder checkpoint.Holder) error {
	if b.writers = nil; b.t.shards == nil || !b.saves || !b.t.others() {
		return nil
	}
	type sight struct {
		First int  `json:"first"` // replica
		Sees  bool `json:"sees"`
	}
	first, _ := b.t.strategy.LocalReplicas()
	mine := sight{First: first}
	if b.cfg.Dir != "" && holder.PID != 0 {
		h, err := checkpoint.ReadHolder(b.cfg.Dir)
		mine.Sees = err == nil && h.Since.Equal(holder.Since) && h.PID == holder.PID && h.Host == holder.Host
	}
	all, err := gatherMessages(ctx, b.t, mine)
	if err != nil {
		return fmt.Errorf("train: restore: comparing the workers' folders: %w", err)
	}
	for _, s := range all {
		if !s.Sees {
			if b.manager != nil {
				b.t.config.Logger.Info("train: not all workers have the folder of the snapshots, so worker 0 writes the "+
					"whole state of the sharded optimizer", "folder", b.cfg.Dir)
			}
			b.writers = nil
			return nil
		}
		b.writers = append(b.writers, s.First)
	}
	return nil
}

// gatherMessages returns the messages of all workers, in their order.
func gatherMessages[T any](ctx context.Context, t *Trainer, mine T) (all []T, err error) {
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	rows := make([]distribute.Value, len(t.parts))
	for i := range rows {
		rows[i] = tensor.New(tensor.Uint8, 0)
	}
	rows[0] = tensor.From(text)
	gathered, err := t.gather(ctx, rows)
	if err != nil {
		return nil, err
	}
	for d := json.NewDecoder(bytes.NewReader(tensor.Data[uint8](gathered))); ; {
		var message T
		switch err := d.Decode(&message); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
		all = append(all, message)
	}
}

// writes lists the pieces of a mirrored variable that this worker writes: a parameter, whole, if it updates the first
// elements, and otherwise what it is the first to keep.
func (b *Backup) writes(variable int) (list []piece) {
	all := b.t.piecesOf(variable)
	if b.t.variables[variable].Role == engine.Parameter {
		all = slices.Clone(all)
		i := slices.IndexFunc(b.t.shards.shares, func(s engine.Share) bool { return s.Parameter == variable })
		all[0].replica = b.t.shards.shares[i].Owner
	}
	for _, p := range all {
		if b.t.localOf(p.replica) >= 0 {
			list = append(list, p)
		}
	}
	return list
}

// pieceName is the name of a range of the elements of a variable, in snapshots and in calls.
func pieceName(name string, from, to int) string { return fmt.Sprintf("%s[%d:%d]", name, from, to) }

// readPieces returns pieces of a mirrored variable, which local replicas have, with their names. A piece of all
// elements is the variable.
func (t *Trainer) readPieces(variable int, pieces []piece) (list []Weight, err error) {
	v := t.variables[variable]
	for _, p := range pieces {
		value, err := t.program.Read(t.localOf(p.replica), variable)
		if err != nil {
			return nil, err
		}
		name := v.Name
		if p.to-p.from < v.Bytes()/v.DType.Bytes() {
			name = pieceName(name, p.from, p.to)
			value = value.Reshape(value.Len())
		}
		list = append(list, Weight{name, value})
	}
	return list, nil
}

// dividedShapes returns the shapes of the variables that workers write in pieces, by name.
func (t *Trainer) dividedShapes() map[string][]int {
	shapes := map[string][]int{}
	for i, v := range t.variables {
		if len(t.piecesOf(i)) > 1 {
			shapes[v.Name] = v.Shape
		}
	}
	return shapes
}

// joinPieces replaces the pieces of variables by the variables, of the shapes given by name.
func joinPieces(list []Weight, shapes map[string][]int) ([]Weight, error) {
	type part struct {
		from  int
		value *tensor.Tensor
	}
	parts, joined := map[string][]part{}, []Weight{}
	for _, w := range list {
		name, from, to, ok := parsePiece(w.Name)
		if _, divided := shapes[name]; !ok || !divided {
			joined = append(joined, w)
			continue
		}
		if s := w.Value.Shape(); len(s) != 1 || s[0] != to-from {
			return nil, fmt.Errorf("%s has shape %s: want %d elements", w.Name, tensor.FormatShape(s), to-from)
		}
		parts[name] = append(parts[name], part{from, w.Value})
	}
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		of := parts[name]
		slices.SortStableFunc(of, func(a, b part) int { return a.from - b.from })
		at := 0
		for _, p := range of {
			if p.from != at || p.value.DType() != of[0].value.DType() {
				return nil, fmt.Errorf("no elements of %s from %d on, but %s from %d on", name, at,
					p.value.DType(), p.from)
			}
			at += p.value.Len()
		}
		n := 1
		for _, d := range shapes[name] {
			if d < 0 || d > 0 && n > at/d {
				n = -1
				break
			}
			n *= d
		}
		if len(of) == 0 || n != at {
			return nil, fmt.Errorf("%d elements of %s in %d pieces: want those of shape %s", at, name, len(of),
				tensor.FormatShape(shapes[name]))
		}
		whole := tensor.New(of[0].value.DType(), shapes[name]...)
		to := whole.Memory().HostBytes()
		for _, p := range of {
			to = to[copy(to, p.value.Memory().HostBytes()):]
		}
		joined = append(joined, Weight{name, whole})
	}
	return joined, nil
}

// parsePiece is the inverse of pieceName.
func parsePiece(text string) (name string, from, to int, ok bool) {
	open := strings.LastIndexByte(text, '[')
	if open < 0 {
		return "", 0, 0, false
	}
	lo, hi, found := strings.Cut(strings.TrimSuffix(text[open+1:], "]"), ":")
	from, errFrom := strconv.Atoi(lo)
	to, errTo := strconv.Atoi(hi)
	ok = found && errFrom == nil && errTo == nil && from >= 0 && to >= from && pieceName(text[:open], from, to) == text
	return text[:open], from, to, ok
}

// startParts waits for the snapshot in progress, which may be another Backup's, and then starts to write a part of a
// new one on every worker.
func (b *Backup) startParts(ctx context.Context) error {
	if p := b.t.partial; p != nil && p.backup != b {
		if err := p.backup.finishParts(ctx); err != nil {
			return err
		}
	}
	if err := b.finishParts(ctx); err != nil {
		return err
	}
	type begun struct {
		Folder string `json:"folder"`
		Error  string `json:"error,omitempty"`
	}
	var mine begun
	var failure error
	chief := b.manager != nil
	if chief {
		if mine.Folder, failure = b.manager.Begin(b.t.committed); failure != nil {
			failure = b.stopIfFailed(failure)
			mine.Error = failure.Error()
		}
	}
	head, err := json.Marshal(mine)
	if err == nil {
		head, err = b.t.fromChief(ctx, chief, head)
	}
	var its begun
	switch {
	case failure != nil:
		return failure
	case err != nil:
		return fmt.Errorf("train: snapshot: receiving the chief's folder: %w", err)
	}
	if err := json.Unmarshal(head, &its); err != nil {
		return fmt.Errorf("train: snapshot: the chief's folder: %w", err)
	}
	if its.Error != "" {
		return fmt.Errorf("the chief fails: %s", its.Error)
	}
	s, err := b.t.snapshot(ctx, b.writes)
	if err != nil {
		return err
	}
	s.Facts, s.Build, s.Job = b.cfg.Facts, b.cfg.Build, b.cfg.Job
	c, err := s.Contents()
	if err != nil {
		return err
	}
	first, _ := b.t.strategy.LocalReplicas()
	p := &partialSnapshot{
		backup: b, contents: &checkpoint.Contents{Step: c.Step, State: c.State}, done: make(chan struct{}),
	}
	b.t.partial = p
	folder, number := filepath.Join(b.cfg.Dir, filepath.Base(its.Folder)), slices.Index(b.writers, first)
	go func() {
		defer close(p.done)
		if p.result.Part, p.result.err = checkpoint.WritePart(folder, number, c.Tensors); p.result.err != nil {
			p.result.Error = p.result.err.Error()
		}
	}()
	return nil
}

// finishParts waits until all workers have written their parts of b's snapshot in progress, if there is one. Then the
// chief completes it in the background. Every worker gets an error if any worker's part could not be written.
func (b *Backup) finishParts(ctx context.Context) error {
	p := b.t.partial
	if p == nil || p.backup != b {
		return b.failed()
	}
	<-p.done
	b.t.partial = nil
	all, err := gatherMessages(ctx, b.t, p.result)
	if err != nil {
		b.abandon()
		return fmt.Errorf("train: snapshot: waiting for the other workers' parts: %w", err)
	}
	parts := make([]checkpoint.Part, len(all))
	for worker, w := range all {
		if parts[worker] = w.Part; w.Error == "" {
			continue
		}
		b.abandon()
		if p.result.err != nil {
			return b.stopIfFailed(p.result.err)
		}
		return b.stopIfFailed(fmt.Errorf("worker %d could not write its part: %s", worker, w.Error))
	}
	if b.manager != nil {
		b.manager.Finish(p.contents, parts)
	}
	return nil
}

// dropParts abandons the snapshot in progress.
func (b *Backup) dropParts() {
	if p := b.t.partial; p != nil && p.backup == b {
		<-p.done
		b.t.partial = nil
		b.abandon()
	}
}

func (b *Backup) abandon() {
	if b.manager != nil {
		b.manager.Abandon()
	}
}

// writing reports whether this worker is writing its part of a snapshot.
func (t *Trainer) writing() bool {
	if t.partial == nil {
		return false
	}
	select {
	case <-t.partial.done:
		return false
	default:
		return true
	}
}

// partsWritten reports whether a snapshot is in progress, of which all workers had written their parts before the
// gradients of the last step were reduced. The result is the same on all workers.
func (t *Trainer) partsWritten() bool {
	return t.partial != nil && t.parts[0].scalars[1+t.sums+agreedWriting] == 0
}
