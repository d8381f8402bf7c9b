package train

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"

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

// writes reports whether this worker writes a variable: the owner of a parameter and of its slots, or the chief.
func (b *Backup) writes(variable int) bool {
	if b.t.variables[variable].Role == engine.Parameter {
		replica := b.t.shards.owners[variable]
		first, n := b.t.strategy.LocalReplicas()
		return replica >= first && replica < first+n
	}
	_, local := b.t.keeper(variable)
	return local >= 0
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

// partsWritten reports whether a snapshot is in progress, and all workers had written their parts before the last step.
// The result is the same on all workers.
func (t *Trainer) partsWritten() bool {
	return t.partial != nil && t.parts[0].scalars[t.shards.writing] == 0
}
