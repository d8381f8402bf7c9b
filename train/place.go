package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// placements decides which workers of a job compute which replicas while Fit trains. The number of replicas is fixed,
// so the bits do not change. Fit calls both methods from its goroutine.
type placements interface {
	// Due reports, without blocking, whether there is a newer placement than the last one that Next has returned. Fit
	// asks before each step. If it is due on any worker, all workers go on with the next one after that step.
	Due() bool
	// Next waits for the next placement. cause is the error that has ended a step, or nil if the workers have agreed on
	// the change: then all workers of the last placement take part in it. Next returns an error if training has to end,
	// such as the cause itself. All workers of a placement get the same one, each with its number and devices. With a
	// negative Worker this worker has no replicas any more, and Fit ends with errLeft.
	Next(ctx context.Context, cause error) (distribute.Placement, error)
}

// errLeft is the error of Fit on a worker that has handed over its replicas.
var errLeft = errors.New("train: the job goes on without this worker, which has no replicas any more")

// errPlace ends the steps of an epoch to change the placement.
var errPlace = errors.New("the placement changes")

// placementDue reports whether this worker has a new placement to report to the others.
func (t *Trainer) placementDue() bool { return t.config.placements != nil && t.config.placements.Due() }

// placementAgreed reports whether the placement of any worker was due when the last step began.
func (t *Trainer) placementAgreed() bool {
	return t.config.placements != nil && t.local[0].scalars[1+t.sums+agreedPlace] > 0
}

// replace changes the placement, and repeats that until it succeeds. cause is the error that ended a step, or errPlace
// if the workers have agreed on the change. Fit then continues at its position, or at the one that it has received.
func (f *fit) replace(ctx context.Context, cause error) error {
	t := f.t
	if t.config.placements == nil || errors.Is(cause, ErrStop) {
		return cause
	}
	t.enter(PhasePlace)
	for {
		agreed := errors.Is(cause, errPlace)
		if agreed {
			cause = nil
		}
		p, err := t.config.placements.Next(ctx, cause)
		if err != nil {
			return err
		}
		if err := t.place(ctx, p, agreed); err == nil || errors.Is(err, errLeft) {
			return err
		} else if cause = fmt.Errorf("train: placing the replicas: %w", err); ctx.Err() != nil {
			return cause
		}
	}
}

// place changes the placement of the replicas, between two steps. If the workers have agreed on it, those that leave
// first send the values that no other worker has. Nothing is compiled, and no bit changes.
func (t *Trainer) place(ctx context.Context, p distribute.Placement, agreed bool) error {
	if t.diloco != nil || t.central {
		return fmt.Errorf("the replicas of %v with %v stay where they are", t.strategy, t.config.Exchange)
	}
	if t.copies == nil { // else an earlier call has failed
		t.started = t.started || t.committed > 0
		if err := t.copyOwn(); err != nil {
			return err
		}
	}
	if agreed && t.others() {
		if err := t.handOver(ctx, p); err != nil {
			return err
		}
	}
	if b := t.partial; b != nil { // a snapshot of which the workers of the last placement write parts
		b.backup.dropParts()
	}
	if p.Worker < 0 {
		return errLeft
	}
	if err := t.strategy.Reform(p, t.distributed...); err != nil {
		return err
	}
	t.replicasOf, t.worker = p.Replicas, p.Worker
	t.stepper = stepper{inner: t.strategy, shapes: t.shapes, number: t.number}
	t.makeSteps()
	if err := t.locate(); err != nil {
		return err
	}
	if err := t.program.Place(t.deviceOf, t.ids()); err != nil {
		return err
	}
	for _, v := range t.table {
		if v.mirrored {
			v.entries[0].owner = t.chiefReplica()
		}
	}
	t.plan()
	if err := t.openExchange(ctx); err != nil {
		return err
	}
	for _, v := range t.compressed() { // what the earlier compression has kept for all replicas
		for local := range t.local {
			if value := t.copies[ofAll][v.name]; value != nil {
				if err := v.write(local, value); err != nil {
					return err
				}
			}
		}
	}
	return t.completeState(ctx)
}

// ofAll is the key in Trainer.copies of values of the compression that all replicas share.
const ofAll = -1

// copyOwn copies the values that only this worker's replicas have.
func (t *Trainer) copyOwn() error {
	copies := map[int]map[string]*tensor.Tensor{ofAll: {}}
	for _, id := range t.ids() {
		copies[id] = map[string]*tensor.Tensor{}
	}
	for _, v := range t.stateTable() {
		for _, e := range v.entries {
			if v.mirrored && v.kind == kindCompression {
				value, err := v.read(0)
				if err != nil {
					return err
				}
				copies[ofAll][v.name] = value
			}
			if copies[e.owner] == nil || v.mirrored {
				continue
			}
			var err error
			if copies[e.owner][v.name], err = t.readEntry(v, e); err != nil {
				return err
			}
		}
	}
	t.copies = copies
	return nil
}

// transfer is that of all values which only one replica has, between two workers.
type transfer struct{ replica, from, to int }

// handOver copies the values of workers that leave to workers that stay: those of each replica to the worker that
// computes it next, or to any.
func (t *Trainer) handOver(ctx context.Context, p distribute.Placement) error {
	next, err := fromWorkers(ctx, t, p.Worker)
	if err != nil {
		return err
	}
	stays := slices.IndexFunc(next, func(worker int) bool { return worker >= 0 })
	if stays < 0 {
		return errors.New("no worker of the last placement is one of the next: their values would be lost")
	}
	var list []transfer
	for worker, ids := range t.replicasOf {
		for _, id := range ids {
			if next[worker] >= 0 {
				continue
			}
			to := slices.Index(next, slices.IndexFunc(p.Replicas, func(of []int) bool { return slices.Contains(of, id) }))
			if to < 0 {
				to = stays
			}
			list = append(list, transfer{id, worker, to})
		}
	}
	return t.move(ctx, list)
}

// move makes transfers between workers of the present placement: from copies to copies. All workers have the same list.
func (t *Trainer) move(ctx context.Context, list []transfer) error {
	for _, x := range list {
		if x.to == t.worker {
			t.copies[x.replica] = map[string]*tensor.Tensor{}
		}
	}
	slices.SortStableFunc(list, func(a, b transfer) int { return t.replicasOf[a.from][0] - t.replicasOf[b.from][0] })
	for _, v := range t.stateTable() {
		for to := range t.replicasOf {
			counts := make([]int, t.strategy.NumReplicasInSync())
			total, own := 0, tensor.New(v.dtype, 0)
			var sent [][]byte
			var parts []entry // of the result, by the replica that they are of
			for _, x := range list {
				for _, e := range v.entries {
					if x.to != to || e.owner != x.replica || v.mirrored {
						continue
					}
					n := e.to - e.from
					counts[t.replicasOf[x.from][0]] += n
					parts = append(parts, entry{total, total + n, x.replica})
					if total += n; x.from == t.worker {
						sent = append(sent, t.copies[x.replica][v.name].Memory().HostBytes())
					}
				}
			}
			if total == 0 {
				continue
			}
			if bytes := slices.Concat(sent...); len(bytes) > 0 {
				own = tensor.New(v.dtype, counts[t.ids()[0]])
				copy(own.Memory().HostBytes(), bytes)
			}
			values := slices.Repeat([]*tensor.Tensor{tensor.New(v.dtype, 0)}, len(t.local))
			values[0] = own
			all, err := t.concatenate(ctx, v.name, values, counts, to)
			if err != nil {
				return fmt.Errorf("moving %s: %w", v.name, err)
			}
			for _, part := range parts {
				if to == t.worker {
					t.copies[part.owner][v.name] = all.Rows(part.from, part.to)
				}
			}
		}
	}
	return nil
}

// holding is what a worker has after the placement has changed.
type holding struct {
	Started  bool  // values of the job
	Step     int64 // committed
	Replicas []int // of which it has all values, after that step
}

// completeState brings all workers to the last step that any of them has committed. A worker at an earlier step, or at
// none, receives the shared values from a worker at that step. Each replica's own values move to its worker.
func (t *Trainer) completeState(ctx context.Context) error {
	all, err := fromWorkers(ctx, t,
		holding{t.started, t.committed, slices.Sorted(maps.Keys(t.copies))})
	if err != nil {
		return err
	}
	last := int64(-1)
	for _, h := range all {
		if h.Started {
			last = max(last, h.Step)
		}
	}
	if last < 0 {
		return t.firstPlacement(ctx)
	}
	current := make([]bool, len(all)) // by worker
	for w, h := range all {
		current[w] = h.Started && h.Step == last
	}
	sender := slices.Index(current, true)
	if slices.Contains(current, false) {
		if err := t.sendPosition(ctx, sender, current[t.worker]); err != nil {
			return err
		}
	}
	list, missing := []transfer{}, []int{}
	for worker, ids := range t.replicasOf {
		for _, id := range ids {
			has := func(w int) bool { return current[w] && slices.Contains(all[w].Replicas, id) }
			holder := slices.IndexFunc(slices.Collect(workers(len(all))), has)
			switch {
			case has(worker):
			case holder >= 0:
				list = append(list, transfer{id, holder, worker})
			case t.hasOwnValues(id):
				missing = append(missing, id)
			}
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("no worker has the values after step %d that only these replicas have, such as averages or parts "+
			"of the optimizer's state: %s: restore a snapshot", last, ranges.Text("replica", missing))
	}
	if err := t.sendShared(ctx, sender, all, current); err != nil {
		return err
	}
	if err := t.move(ctx, list); err != nil {
		return err
	}
	return t.writeCopies()
}

// workers yields the numbers of n workers.
func workers(n int) func(yield func(int) bool) {
	return func(yield func(int) bool) {
		for w := range n {
			if !yield(w) {
				return
			}
		}
	}
}

// hasOwnValues reports whether a replica has values that no other has.
func (t *Trainer) hasOwnValues(replica int) bool {
	return slices.ContainsFunc(t.stateTable(), func(v *stateValue) bool {
		return !v.shared && slices.ContainsFunc(v.entries, func(e entry) bool { return e.owner == replica })
	})
}

// firstPlacement begins the training of workers of which each has its own initial values.
func (t *Trainer) firstPlacement(ctx context.Context) error {
	if err := t.writeCopies(); err != nil {
		return err
	}
	err := t.startEqual(ctx)
	t.started = err == nil
	return err
}

// writeCopies sets the values that only this worker's replicas have to those of the copies.
func (t *Trainer) writeCopies() error {
	for _, v := range t.stateTable() {
		for _, e := range v.entries {
			value, local := t.copies[e.owner][v.name], t.localOf(e.owner)
			if value == nil || local < 0 {
				continue
			}
			if value.Len() == elements(v.shape) {
				value = value.Reshape(v.shape...)
			}
			if err := v.write(local, value); err != nil {
				return err
			}
		}
	}
	t.copies, t.started = nil, true
	return nil
}

// sendShared gives the workers that do not have them the values that several replicas have.
func (t *Trainer) sendShared(ctx context.Context, sender int, all []holding, current []bool) error {
	if !t.others() {
		return nil
	}
	for _, v := range t.stateTable() {
		if !v.shared || v.mirrored && !slices.Contains(current, false) {
			continue
		}
		from := sender
		values := slices.Repeat([]*tensor.Tensor{tensor.New(v.dtype, 0)}, len(t.local))
		if !v.mirrored {
			from = slices.IndexFunc(all, func(h holding) bool {
				return h.Started && h.Step == all[sender].Step && slices.Contains(h.Replicas, v.entries[0].owner)
			})
		}
		var err error
		switch {
		case from < 0:
			err = fmt.Errorf("no worker has %s: restore a snapshot", v.name)
		case from == t.worker && v.mirrored:
			values[0], err = v.read(0)
		case from == t.worker:
			values[0] = t.copies[v.entries[0].owner][v.name]
		}
		if err != nil {
			return err
		}
		values[0] = values[0].Reshape(values[0].Len())
		value, err := distribute.Gather(ctx, t.strategy, values, 0)
		if err != nil {
			return fmt.Errorf("receiving %s: %w", v.name, err)
		}
		for local := range t.local {
			if v.mirrored && current[t.worker] {
				break
			}
			if err := v.write(local, value.Reshape(v.shape...)); err != nil {
				return err
			}
		}
	}
	return nil
}

// sendPosition sends the numbers and the state of Fit of a worker to those that are not current. All forget which
// variables were set between steps, because the others cannot know them.
func (t *Trainer) sendPosition(ctx context.Context, sender int, current bool) error {
	if err := t.compareModels(ctx); err != nil {
		return err
	}
	var c *checkpoint.Contents
	var message restoreMessage
	var text []byte
	var err error
	if t.worker == sender {
		if c, err = t.position().Contents(); err != nil {
			return err
		}
		message = messageOf(c)
		if text, err = encodeMessage(message); err != nil {
			return err
		}
	}
	if text, err = t.fromWorker(ctx, t.worker == sender, text); err == nil {
		err = json.Unmarshal(text, &message)
	}
	if err == nil {
		c, err = t.receiveContents(ctx, message, t.worker == sender, c)
	}
	if t.assigned = (assigned{variable: -1}); err != nil || current {
		return err
	}
	s, err := SnapshotOf(c)
	if err != nil {
		return err
	}
	t.started, t.copies = false, map[int]map[string]*tensor.Tensor{}
	t.setPosition(s)
	return nil
}
