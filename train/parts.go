package train

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

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
	if b.inParts = false; !b.t.Sharded() || !b.saves || !b.t.others() {
		return nil
	}
	sees := false
	if b.cfg.Dir != "" && holder.PID != 0 {
		h, err := checkpoint.ReadHolder(b.cfg.Dir)
		sees = err == nil && h.Since.Equal(holder.Since) && h.PID == holder.PID && h.Host == holder.Host
	}
	all, err := fromWorkers(ctx, b.t, sees)
	if err != nil {
		return fmt.Errorf("train: restore: comparing the workers' folders: %w", err)
	}
	if b.inParts = !slices.Contains(all, false); !b.inParts && b.manager != nil {
		b.t.config.Logger.Info("train: not all workers have the folder of the snapshots, so worker 0 writes the "+
			"whole state of the sharded optimizer", "folder", b.cfg.Dir)
	}
	return nil
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
	var folder string
	var failure error
	if b.manager != nil {
		folder, failure = b.manager.Begin(b.t.committed)
		failure = b.stopIfFailed(failure)
	}
	folder, err := fromChief(ctx, b.t, folder, failure)
	switch {
	case failure != nil:
		return failure
	case err != nil:
		return fmt.Errorf("train: snapshot: %w", err)
	}
	var own []Weight
	divided, bytes := map[string][]int{}, make([]int, len(b.t.replicasOf))
	s, err := b.t.snapshot(ctx)
	if err != nil {
		return err
	}
	for _, v := range b.t.stateTable() {
		pieces, err := b.t.ownPieces(v, bytes)
		if err != nil {
			return fmt.Errorf("train: snapshot: reading %s: %w", v.name, err)
		}
		own = append(own, pieces...)
		if v.inPieces() {
			divided[v.name] = v.storedShape()
		}
		s.add(v, nil) // the manifest has its name
	}
	if b.t.IsChief() {
		own = append(own, s.state.Fit.tensors()...)
	}
	s.state.Divided = divided
	c, err := b.contents(s)
	if err != nil {
		return err
	}
	c.Tensors = nil
	p := &partialSnapshot{backup: b, contents: c, done: make(chan struct{})}
	b.t.partial = p
	folder = filepath.Join(b.cfg.Dir, filepath.Base(folder))
	go func() {
		defer close(p.done)
		if p.result.Part, p.result.err = checkpoint.WritePart(folder, b.t.worker, tensorsOf(own)); p.result.err != nil {
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
	all, err := fromWorkers(ctx, b.t, p.result)
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
	return t.partial != nil && t.local[0].scalars[1+t.sums+agreedWriting] == 0
}
