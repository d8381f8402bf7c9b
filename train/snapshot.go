package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// Snapshot is the complete state for resuming training as if it had not stopped: the bits of every variable,
// including the optimizer's and each replica's averages, and the position of [Trainer.Fit]. (TensorFlow saves
// averages combined over replicas; [Trainer.Weights] returns those.)
type Snapshot struct {
	Step        int64 // steps taken, as Trainer.Steps counts them
	Seed        int64 // Config.Seed
	GlobalBatch int   // Config.GlobalBatch
	Replicas    int   // number of replicas, over all workers
	// Variables holds all variables, in the order of Trainer.Variables. An average has one row per replica; see also
	// DiLoCo.
	Variables []Weight
	// Compress is Config.Compress, and Compression what its exchanges keep from step to step. What differs between
	// replicas has one row per replica.
	Compress    compress.Codec
	Compression []Weight
	// DiLoCo is Config.DiLoCo, or nil. Workers is then the number of workers, and a slot in Variables has one row per
	// worker. OuterMomentum is the momentum of the outer steps, by parameter.
	DiLoCo        *DiLoCo
	Workers       int
	OuterMomentum []Weight
	// Facts, Build and Job describe the program; see [BackupConfig].
	Facts, Build []Fact
	Job          string

	passes  int64      // Trainer.passes
	buckets []string   // the hash of the names of each bucket, which the last bits may depend on; nil: unknown
	compute string     // Trainer.computeName
	scale   *lossScale // nil: none
	// divided has the shapes of the variables of which this is a part with pieces of them, by name; nil: they are whole.
	divided map[string][]int
	outer   int64 // outer steps of DiLoCo taken
	// division has the number of replicas of each worker of a training with DiLoCo; nil: unknown.
	division []int
	fit      *fitState // nil: taken outside Fit
}

// Epoch returns Fit's position: the epoch, from 0, and the steps of it that were taken. It returns 0, 0 for a
// snapshot taken outside Fit.
func (s *Snapshot) Epoch() (epoch, step int) {
	if s.fit == nil {
		return 0, 0
	}
	return s.fit.Epoch, s.fit.Step
}

// snapshotState is a Snapshot without its variables, as the manifest holds it.
type snapshotState struct {
	Step        int64    `json:"step"`
	Passes      int64    `json:"passes,omitempty"` // of Trainer.Gradients after the step
	Seed        int64    `json:"seed"`
	GlobalBatch int      `json:"global_batch"`
	Replicas    int      `json:"replicas"`
	Buckets     []string `json:"buckets,omitempty"` // of each bucket of gradients, the hash of their names
	// Divided has the shapes of the variables whose elements are in several tensors, NAME[FROM:TO], by name.
	Divided     map[string][]int `json:"divided,omitempty"`
	Compress    string           `json:"compress,omitempty"`    // Config.Compress; without it, none
	Compression []string         `json:"compression,omitempty"` // the names of the tensors that are not variables
	Facts       []Fact           `json:"facts,omitempty"`
	Build       []Fact           `json:"build,omitempty"`
	Job         string           `json:"job,omitempty"`
	Compute     string           `json:"compute,omitempty"` // the half type of a model of mixed precision
	LossScale   *lossScale       `json:"loss_scale,omitempty"`
	DiLoCo      *outerState      `json:"diloco,omitempty"`
	Fit         *fitState        `json:"fit,omitempty"`
}

// outerState is the part of DiLoCo in a snapshot's state.
type outerState struct {
	DiLoCo
	Workers  int      `json:"workers"`
	Replicas []int    `json:"replicas,omitempty"` // of each worker; nil: an older version wrote the snapshot
	Outer    int64    `json:"outer_steps"`
	Momentum []string `json:"momentum_tensors"` // the names of the tensors that are the outer momentum
}

// check returns an error if the state is invalid.
func (s *outerState) check() error {
	if s == nil {
		return nil
	}
	if err := s.DiLoCo.check(); err != nil {
		return fmt.Errorf("DiLoCo: %w", err)
	}
	if s.Workers < 1 || s.Outer < 0 {
		return fmt.Errorf("DiLoCo: %d workers after %d outer steps", s.Workers, s.Outer)
	}
	if s.Replicas != nil && (len(s.Replicas) != s.Workers || slices.Min(s.Replicas) < 1) {
		return fmt.Errorf("DiLoCo: %d workers of %v replicas", s.Workers, s.Replicas)
	}
	return nil
}

// Contents converts the snapshot to the form that package checkpoint writes. The tensors are shared, not
// copied.
func (s *Snapshot) Contents() (*checkpoint.Contents, error) {
	saved := snapshotState{
		Step: s.Step, Passes: s.passes, Seed: s.Seed, GlobalBatch: s.GlobalBatch, Replicas: s.Replicas, Facts: s.Facts,
		Build: s.Build, Job: s.Job, Buckets: s.buckets, Fit: s.fit,
		Compute: s.compute, LossScale: s.scale, Divided: s.divided,
	}
	if s.Compress != (compress.Codec{}) {
		saved.Compress = s.Compress.String()
	}
	for _, v := range s.Compression {
		saved.Compression = append(saved.Compression, v.Name)
	}
	if s.DiLoCo != nil {
		saved.DiLoCo = &outerState{DiLoCo: *s.DiLoCo, Workers: s.Workers, Replicas: s.division, Outer: s.outer}
		for _, v := range s.OuterMomentum {
			saved.DiLoCo.Momentum = append(saved.DiLoCo.Momentum, v.Name)
		}
	}
	state, err := json.Marshal(saved)
	if err != nil {
		return nil, fmt.Errorf("train: snapshot: %w", err)
	}
	c := &checkpoint.Contents{Step: s.Step, State: state}
	for _, v := range slices.Concat(s.Variables, s.Compression, s.OuterMomentum, s.fit.tensors()) {
		c.Tensors = append(c.Tensors, checkpoint.Tensor(v))
	}
	return c, nil
}

// SnapshotOf converts c, as read by package checkpoint, to a Snapshot. It is the inverse of
// [Snapshot.Contents]. The tensors are shared, not copied.
func SnapshotOf(c *checkpoint.Contents) (*Snapshot, error) {
	var state snapshotState
	if err := json.Unmarshal(c.State, &state); err != nil {
		return nil, fmt.Errorf("train: snapshot: its state: %w", err)
	}
	s := &Snapshot{
		Step: state.Step, Seed: state.Seed, GlobalBatch: state.GlobalBatch, Replicas: state.Replicas,
		Facts: state.Facts, Build: state.Build, Job: state.Job, passes: state.Passes, buckets: state.Buckets, fit: state.Fit,
		compute: state.Compute, scale: state.LossScale,
	}
	if err := s.scale.check(); err != nil {
		return nil, fmt.Errorf("train: snapshot: its state: %w", err)
	}
	if s.Step < 0 || s.passes < 0 || s.Replicas < 1 || s.GlobalBatch < 1 {
		return nil, fmt.Errorf("train: snapshot: invalid state: step %d, %d replicas, global batch %d", s.Step, s.Replicas,
			s.GlobalBatch)
	}
	if s.fit != nil {
		if err := s.fit.check(); err != nil {
			return nil, fmt.Errorf("train: snapshot: its state: %w", err)
		}
	}
	if state.Compress != "" {
		var err error
		if s.Compress, err = compress.Parse(state.Compress); err != nil {
			return nil, fmt.Errorf("train: snapshot: its state: %w", err)
		}
	}
	var momentum []string
	if d := state.DiLoCo; d != nil {
		if err := d.check(); err != nil {
			return nil, fmt.Errorf("train: snapshot: its state: %w", err)
		}
		s.DiLoCo, s.Workers, s.division, s.outer, momentum = &d.DiLoCo, d.Workers, d.Replicas, d.Outer, d.Momentum
	}
	for _, t := range c.Tensors {
		switch {
		case s.fit.take(Weight(t)):
		case slices.Contains(state.Compression, t.Name):
			s.Compression = append(s.Compression, Weight(t))
		case slices.Contains(momentum, t.Name):
			s.OuterMomentum = append(s.OuterMomentum, Weight(t))
		default:
			s.Variables = append(s.Variables, Weight(t))
		}
	}
	if len(state.Divided) > 0 {
		var err error
		if s.Variables, err = joinPieces(s.Variables, state.Divided); err != nil {
			return nil, fmt.Errorf("train: snapshot: %w", err)
		}
	}
	return s, nil
}

// Snapshot returns the state of training between two steps. In a callback of [Trainer.Fit] it includes Fit's
// position; after [Trainer.Restore] it includes the position at which Fit will resume; otherwise it has no
// position. With several workers, every worker calls it: the chief gets the snapshot, the others get nil. The
// others wait only until the chief has gathered the replicas' averages. The tensors are copies and belong to
// the caller. With DiLoCo it is an error between two outer steps.
func (t *Trainer) Snapshot(ctx context.Context) (*Snapshot, error) {
	s, err := t.snapshot(ctx, nil)
	if err != nil || !t.strategy.Properties().ShouldCheckpoint {
		return nil, err
	}
	return s, nil
}

// snapshot returns the state of training. Its variables are all of them on the chief, and none on other workers. If
// writes is not nil, those that all replicas have in common are the pieces that it returns, which this worker has.
func (t *Trainer) snapshot(ctx context.Context, writes func(variable int) []piece) (*Snapshot, error) {
	if err := t.betweenRounds(); err != nil {
		return nil, fmt.Errorf("train: snapshot: %w", err)
	}
	t.at(PhaseSnapshot)
	chief := t.strategy.Properties().ShouldCheckpoint
	s := &Snapshot{
		Step: t.committed, Seed: t.config.Seed, GlobalBatch: t.config.GlobalBatch,
		Replicas: t.strategy.NumReplicasInSync(), passes: t.passes, Compress: t.config.Compress,
		buckets: t.bucketHashes(), compute: t.computeName(),
	}
	if scale := t.scale; scale.Scale != 0 {
		s.scale = &scale
	}
	if writes != nil {
		s.divided = t.dividedShapes()
	}
	for i, v := range t.variables {
		var value *tensor.Tensor
		var pieces []Weight
		var err error
		switch {
		case v.Role == engine.Average:
			value, err = t.readRows(ctx, i, false)
		case !t.mirrored(v):
			value, err = t.readRows(ctx, i, true)
		case writes != nil:
			pieces, err = t.readPieces(i, writes(i))
		case t.divided(i):
			value, err = t.keptAtChief(ctx, i)
		case chief:
			value, err = t.program.Read(0, i)
		}
		if err != nil {
			return nil, fmt.Errorf("train: snapshot: reading %s: %w", v.Name, err)
		}
		if s.Variables = append(s.Variables, pieces...); chief && value != nil {
			s.Variables = append(s.Variables, Weight{v.Name, value})
		}
	}
	var err error
	if s.Compression, err = t.readCompression(ctx, chief); err != nil {
		return nil, fmt.Errorf("train: snapshot: %w", err)
	}
	if chief {
		t.saveDiLoCo(s)
	}
	if f := t.fitting.Load(); f != nil {
		s.fit = f.state()
	} else {
		s.fit = t.resume
	}
	return s, nil
}

// readRows returns, on the chief, the values of a variable on all replicas, or on the first one of each worker: one row
// each.
func (t *Trainer) readRows(ctx context.Context, variable int, perWorker bool) (*tensor.Tensor, error) {
	rows := make([]*tensor.Tensor, len(t.parts))
	for replica := range rows {
		value, err := t.program.Read(replica, variable)
		if err != nil {
			return nil, fmt.Errorf("on replica %d: %w", replica, err)
		}
		rows[replica] = value
	}
	return t.gatherAtChief(ctx, t.variables[variable].Name, rows, perWorker)
}

const chiefReplica = 0 // the chief's first replica

// gatherAtChief returns, on the chief, a row for each replica of all workers, or for the first one of each worker.
// Other workers, which only send theirs, get nil. values has those of the local replicas.
func (t *Trainer) gatherAtChief(ctx context.Context, name string, values []*tensor.Tensor, perWorker bool,
) (*tensor.Tensor, error) {
	n, shape := t.strategy.NumReplicasInSync(), values[0].Shape()
	counts := make([]int, n)
	rows := 0
	for replica := range counts {
		first := slices.Contains(t.firsts, replica) || t.firsts == nil && replica == chiefReplica
		if !perWorker || first {
			counts[replica] = values[0].Len()
			rows++
		}
	}
	var all *tensor.Tensor
	if t.strategy.Properties().ShouldCheckpoint {
		all = tensor.New(values[0].DType(), rowShape(rows, shape)...)
	}
	if !t.others() {
		to := all.Memory().HostBytes()
		for _, v := range values[:rows] {
			to = to[copy(to, v.Memory().HostBytes()):]
		}
		return all, nil
	}
	return all, t.sendToChief(ctx, name, all, values, counts)
}

// sendToChief gathers what replicas send in all, which only the chief needs. counts has the number of elements of every
// replica. values has those of the local replicas, and any tensor of the type for a replica that sends none.
func (t *Trainer) sendToChief(ctx context.Context, name string, all *tensor.Tensor, values []*tensor.Tensor,
	counts []int,
) error {
	return t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
		src := values[r.LocalID()]
		if counts[r.ID()] == 0 {
			src = tensor.New(src.DType(), 0)
		}
		h, err := r.StartGather(ctx, all, src, counts, chiefReplica, name)
		if err == nil {
			err = h.Wait(ctx)
		}
		return err
	})
}

func rowShape(rows int, shape []int) []int { return append([]int{rows}, shape...) }

// gather concatenates one tensor per replica, of all workers, along the first dimension.
func (t *Trainer) gather(ctx context.Context, rows []distribute.Value) (*tensor.Tensor, error) {
	if !t.others() {
		pieces := make([][]*tensor.Tensor, len(rows))
		for i, r := range rows {
			pieces[i] = []*tensor.Tensor{r.(*tensor.Tensor)}
		}
		return join(pieces, 0), nil
	}
	all, err := t.strategy.Gather(ctx, distribute.NewPerReplica(rows...), 0)
	if err != nil {
		return nil, err
	}
	return all.(*tensor.Tensor), nil
}

// Restored is the result of [Trainer.Restore].
type Restored struct {
	Found          bool     // a snapshot was restored
	Step           int64    // steps taken before the snapshot
	Epoch, EpochAt int      // where Fit resumes: the epoch, from 0, and the number of its steps that were taken
	Path           string   // the snapshot's folder, on the chief's machine; set by [Backup.Restore]
	Refused        []string // newer snapshots that could not be read, with the cause; set by [Backup.Restore]
	Differ         []string // reasons why the bits differ from those of an uninterrupted training from here on
}

// Restore sets all variables, the number of steps, and the position at which the next [Trainer.Fit] resumes,
// to those of a snapshot. With several workers, every worker calls it. The chief sends its snapshot to the
// others, which may pass nil. If the chief passes nil, nothing happens.
//
// The trainer must have the snapshot's variables, seed and global batch. It may have another number of
// workers, which changes no bit without DiLoCo. If it has another number of replicas, every replica gets the mean of
// the averages of the snapshot's replicas, and [Restored] reports that bits differ from here on. What compressed
// gradients have kept for the next step is then divided evenly among the replicas; with another Config.Compress than
// the snapshot's it is dropped, which Restored reports too. With DiLoCo and another number of workers, every worker
// gets the mean of the workers' slots, or the first worker's if they are not floating-point numbers. A snapshot with
// DiLoCo can be restored without it, and the reverse: the slots are then combined in the same way, or the outer
// momentum starts at 0. Restored reports all of it, and with DiLoCo also the same replicas divided otherwise among as
// many workers. On error nothing has changed, unless the engine itself failed.
func (t *Trainer) Restore(ctx context.Context, s *Snapshot) (Restored, error) {
	s, _, err := t.share(ctx, s, shared{}, nil)
	if s == nil || err != nil {
		return Restored{}, err
	}
	return t.restore(s)
}

// restore implements Restore once all workers have the snapshot.
func (t *Trainer) restore(s *Snapshot) (Restored, error) {
	values, err := t.fitSnapshot(s)
	if err != nil {
		return Restored{}, err
	}
	first := 0
	if s.Replicas == t.strategy.NumReplicasInSync() {
		first, _ = t.strategy.LocalReplicas()
	}
	for i, rows := range values {
		for replica := range t.parts {
			row := first + replica
			if t.variables[i].Role != engine.Average {
				row = t.worker
			}
			if err := t.program.Write(replica, i, rows[min(row, len(rows)-1)]); err != nil {
				return Restored{}, fmt.Errorf("train: restore: %s on replica %d: %w", t.variables[i].Name, replica, err)
			}
		}
	}
	// all workers have the snapshot's values now
	t.committed, t.passes, t.resume, t.assigned = s.Step, s.passes, s.fit, assigned{variable: -1}
	r := Restored{Found: true, Step: s.Step}
	r.Epoch, r.EpochAt = s.Epoch()
	if why := t.restoreDiLoCo(s); why != "" {
		r.Differ = append(r.Differ, why)
	}
	if n := t.strategy.NumReplicasInSync(); n != s.Replicas {
		r.Differ = append(r.Differ, fmt.Sprintf("the snapshot was made by %s, this is %s: averages were combined, and sums "+
			"are made in another order", plural(s.Replicas, "replica"), plural(n, "replica")))
	}
	if s.buckets != nil && s.Replicas == t.strategy.NumReplicasInSync() && !slices.Equal(s.buckets, t.bucketHashes()) {
		r.Differ = append(r.Differ, "the snapshot was made with other buckets of gradients: an engine may round "+
			"differently: give the same Config.BucketBytes")
	}
	if why := t.restorePrecision(s); why != "" {
		r.Differ = append(r.Differ, why)
	}
	if why := t.restoreCompression(s); why != "" {
		r.Differ = append(r.Differ, why)
	}
	return r, nil
}

// bucketHashes identifies the gradients of each bucket.
func (t *Trainer) bucketHashes() []string {
	hashes := make([]string, len(t.buckets))
	for k, b := range t.buckets {
		hashes[k] = b.hash
	}
	return hashes
}

// fitSnapshot returns, by variable, the value of each replica, or a single value if it is the same on all.
func (t *Trainer) fitSnapshot(s *Snapshot) ([][]*tensor.Tensor, error) {
	if s.Seed != t.config.Seed || s.GlobalBatch != t.config.GlobalBatch {
		return nil, fmt.Errorf("train: restore: the snapshot was made with seed %d and a global batch of %s, and this "+
			"training has seed %d and %s: it would be a different training; to start from the weights alone, use SetWeights",
			s.Seed, plural(s.GlobalBatch, "example"), t.config.Seed, plural(t.config.GlobalBatch, "example"))
	}
	byName := make(map[string]*tensor.Tensor, len(s.Variables))
	for _, v := range s.Variables {
		byName[v.Name] = v.Value
	}
	values := make([][]*tensor.Tensor, len(t.variables))
	for i, v := range t.variables {
		value, ok := byName[v.Name]
		if !ok {
			return nil, fmt.Errorf("train: restore: the snapshot has no variable %s: it is of another model or optimizer",
				v.Name)
		}
		delete(byName, v.Name)
		shape, rows, now := v.Shape, 0, 0 // rows: what differs has as many, where this training has another number
		switch {
		case v.Role == engine.Average:
			rows, now = s.Replicas, t.strategy.NumReplicasInSync()
		case v.Role == engine.Slot && s.DiLoCo != nil:
			rows, now = s.Workers, t.slotRows()
		}
		if rows > 0 {
			shape = rowShape(rows, shape)
		}
		if err := fits(value, v.DType, shape); err != nil {
			return nil, fmt.Errorf("train: restore: %s: %w: the snapshot is of another model or optimizer", v.Name, err)
		}
		switch {
		case rows == 0:
			values[i] = []*tensor.Tensor{value}
		case rows != now:
			values[i] = []*tensor.Tensor{oneOfRows(value, v)}
		default:
			for r := range rows {
				values[i] = append(values[i], value.Rows(r, r+1).Reshape(v.Shape...))
			}
		}
	}
	for name := range byName {
		return nil, fmt.Errorf("train: restore: the model has no variable %s: the snapshot is of another model or optimizer",
			name)
	}
	return values, nil
}

// oneOfRows returns one value of v for those of several replicas or workers: the mean of floating-point numbers,
// otherwise the first value.
func oneOfRows(rows *tensor.Tensor, v engine.Variable) *tensor.Tensor {
	if v.DType.IsFloat() {
		return meanOfRows(rows, v.Shape)
	}
	return rows.Rows(0, 1).Reshape(v.Shape...)
}

// meanOfRows returns the mean over the first dimension, summed in float64.
func meanOfRows(rows *tensor.Tensor, shape []int) *tensor.Tensor {
	n := rows.Shape()[0]
	sums := make([]float64, rows.Len()/n)
	for i, x := range rows.Float64s() {
		sums[i%len(sums)] += x
	}
	for i := range sums {
		sums[i] /= float64(n)
	}
	return fromFloat64s(rows.DType(), shape, sums)
}

// shared is the chief's message to the other workers, sent before the tensors.
type shared struct {
	Restored Restored `json:"restored"`
	Saves    bool     `json:"saves"`
	Anew     bool     `json:"anew"`  // newer snapshots than the restored one exist
	Every    int      `json:"every"` // BackupConfig.EverySteps

	Holder checkpoint.Holder `json:"holder"` // of the folder's lock

	Failure string          `json:"failure,omitempty"`
	State   json.RawMessage `json:"state,omitempty"` // nil: no snapshot
	Tensors []sharedTensor  `json:"tensors,omitempty"`
}

type sharedTensor struct {
	Name  string       `json:"name"`
	DType tensor.DType `json:"dtype"`
	Shape []int        `json:"shape"`
}

// value returns the tensor with the given bytes as its elements.
func (s sharedTensor) value(elements []byte) (*tensor.Tensor, error) {
	if !s.DType.Valid() || s.DType == tensor.String {
		return nil, fmt.Errorf("invalid dtype %d: want a numeric dtype", s.DType)
	}
	n, empty := 1, false
	for _, d := range s.Shape {
		switch {
		case d == 0:
			empty = true
		case d < 0 || n > math.MaxInt/8/d: // more than can be addressed
			return nil, fmt.Errorf("invalid shape %s", tensor.FormatShape(s.Shape))
		default:
			n *= d
		}
	}
	if empty {
		n = 0
	}
	if n*s.DType.Bytes() != len(elements) {
		return nil, fmt.Errorf("got %d bytes for %v%s", len(elements), s.DType, tensor.FormatShape(s.Shape))
	}
	out := tensor.New(s.DType, s.Shape...)
	copy(out.Memory().HostBytes(), elements)
	return out, nil
}

// share sends the chief's snapshot and message to all workers, or the error that the chief failed with.
func (t *Trainer) share(ctx context.Context, s *Snapshot, message shared, failure error) (*Snapshot, shared, error) {
	if !t.others() {
		return s, message, failure
	}
	t.at(PhaseRestore)
	chief := t.strategy.Properties().ShouldCheckpoint
	var head []byte
	var tensors []checkpoint.Tensor
	if chief {
		if failure == nil && s != nil {
			c, err := s.Contents()
			if err != nil {
				failure = err
			} else {
				message.State, tensors = c.State, c.Tensors
			}
		}
		if failure != nil {
			message.Failure = failure.Error()
		}
		for _, v := range tensors {
			message.Tensors = append(message.Tensors, sharedTensor{v.Name, v.Value.DType(), v.Value.Shape()})
		}
		head, _ = json.Marshal(message) // cannot fail: strings, numbers, and JSON made by Marshal
	}
	head, err := t.fromChief(ctx, chief, head)
	if err != nil {
		return nil, message, fmt.Errorf("train: restore: receiving the chief's message: %w", err)
	}
	message = shared{}
	switch err := json.Unmarshal(head, &message); {
	case failure != nil:
		return nil, message, failure
	case err != nil:
		return nil, message, fmt.Errorf("train: restore: the chief's message: %w", err)
	case message.Failure != "":
		return nil, message, &chiefError{message.Failure}
	case message.State == nil:
		return nil, message, nil
	}
	c := &checkpoint.Contents{State: message.State}
	for i, v := range message.Tensors {
		var mine []byte
		if chief {
			mine = tensors[i].Value.Memory().HostBytes()
		}
		bits, err := t.fromChief(ctx, chief, mine)
		if err != nil {
			return nil, message, fmt.Errorf("train: restore: getting %s from the chief: %w", v.Name, err)
		}
		value, err := v.value(bits)
		if err != nil {
			return nil, message, fmt.Errorf("train: restore: getting %s from the chief: %w", v.Name, err)
		}
		c.Tensors = append(c.Tensors, checkpoint.Tensor{Name: v.Name, Value: value})
	}
	s, err = SnapshotOf(c)
	return s, message, err
}

// fromChief returns the chief's bytes on every worker.
func (t *Trainer) fromChief(ctx context.Context, chief bool, mine []byte) ([]byte, error) {
	return t.fromWorker(ctx, chief, mine)
}

// fromWorker returns, on every worker, the bytes of the worker that set sends. It is a gather to which only
// that worker's first replica contributes.
func (t *Trainer) fromWorker(ctx context.Context, sends bool, mine []byte) ([]byte, error) {
	rows := make([]distribute.Value, len(t.parts))
	for i := range rows {
		rows[i] = tensor.New(tensor.Uint8, 0)
	}
	if sends {
		rows[0] = tensor.From(mine)
	}
	all, err := t.gather(ctx, rows)
	if err != nil {
		return nil, err
	}
	return slices.Clone(tensor.Data[uint8](all)), nil
}
