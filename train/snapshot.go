package train

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// Snapshot is the complete state for resuming training as if it had not stopped: the bits of every variable,
// including the optimizer's and each replica's averages, and the position of [Trainer.Fit]. (TensorFlow saves
// averages combined over replicas; [Trainer.Weights] returns those.)
type Snapshot struct {
	Step        int64 `json:"step"`         // steps taken, as Trainer.Steps counts them
	Seed        int64 `json:"seed"`         // Config.Seed
	GlobalBatch int   `json:"global_batch"` // Config.GlobalBatch
	Replicas    int   `json:"replicas"`     // number of replicas, over all workers
	// Variables holds all variables: from Trainer.Snapshot in the order of Trainer.Variables, from SnapshotOf in the order
	// of the tensors, and then those that were divided. An average has a component per replica, along its first
	// dimension; see also DiLoCo.
	Variables []Weight `json:"-"`
	// Compress is that of Config.Exchange, and Compression what its exchanges keep from step to step. What differs between
	// replicas has a component per replica.
	Compress    compress.Codec `json:"-"`
	Compression []Weight       `json:"-"`
	// DiLoCo is Config.Exchange, or nil if it is another. Workers is then the number of workers, and a slot in Variables
	// has a component per worker. OuterMomentum is the momentum of the outer steps, by parameter.
	DiLoCo        *DiLoCo  `json:"-"`
	Workers       int      `json:"-"`
	OuterMomentum []Weight `json:"-"`
	// Facts, Build, Job and Metadata describe the program; see [BackupConfig].
	Facts    []Fact            `json:"facts,omitempty"`
	Build    []Fact            `json:"build,omitempty"`
	Job      string            `json:"job,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`

	state snapshotState
}

// Epoch returns Fit's position: the epoch, from 0, and the steps of it that were taken. It returns 0, 0 for a
// snapshot taken outside Fit.
func (s *Snapshot) Epoch() (epoch, step int) {
	if s.state.Fit == nil {
		return 0, 0
	}
	return s.state.Fit.Epoch, s.state.Fit.Step
}

// snapshotState is what the manifest of a snapshot holds besides the fields of Snapshot.
type snapshotState struct {
	Passes  int64    `json:"passes,omitempty"`  // of Trainer.Gradients after the step
	Buckets []string `json:"buckets,omitempty"` // of each bucket of gradients, the hash of their names; nil: unknown
	// Divided has the shapes of the values whose elements are in several tensors, NAME[FROM:TO], by name.
	Divided     map[string][]int `json:"divided,omitempty"`
	Compress    string           `json:"compress,omitempty"`    // Snapshot.Compress; without it, none
	Compression []string         `json:"compression,omitempty"` // the names of Snapshot.Compression
	Compute     string           `json:"compute,omitempty"`     // the half type of a model of mixed precision
	LossScale   *lossScale       `json:"loss_scale,omitempty"`  // nil: none
	DiLoCo      *outerState      `json:"diloco,omitempty"`
	Fit         *fitState        `json:"fit,omitempty"` // nil: taken outside Fit
}

// manifest returns what is encoded in the manifest of a snapshot.
func (s *Snapshot) manifest(state *snapshotState) any {
	return &struct {
		*Snapshot
		*snapshotState
	}{s, state}
}

// outerState is the state of DiLoCo. DiLoCo, Workers and Momentum are those of Snapshot.
type outerState struct {
	DiLoCo
	Workers  int      `json:"workers"`
	Replicas []int    `json:"replicas,omitempty"`    // of each worker; nil: an older version wrote the snapshot
	IDs      [][]int  `json:"replica_ids,omitempty"` // by worker, of its replicas; nil: they count up over the workers
	Outer    int64    `json:"outer_steps"`
	Momentum []string `json:"momentum_tensors"` // the names of the tensors that are the outer momentum
}

func (s *Snapshot) outerState() *outerState { return cmp.Or(s.state.DiLoCo, &outerState{}) }

// outerState returns the state of DiLoCo without what Snapshot has.
func (t *Trainer) outerState() *outerState {
	s := &outerState{Outer: t.outer}
	for _, ids := range t.replicasOf {
		s.Replicas = append(s.Replicas, len(ids))
	}
	if !sameDivision(s.division(), t.replicasOf) {
		s.IDs = t.replicasOf
	}
	return s
}

// division returns the ids of each worker's replicas, or nil if they are not known.
func (s *outerState) division() [][]int {
	if s.IDs != nil {
		return s.IDs
	}
	var byWorker [][]int
	next := 0
	for _, n := range s.Replicas {
		var ids []int
		for range n {
			ids = append(ids, next)
			next++
		}
		byWorker = append(byWorker, ids)
	}
	return byWorker
}

func sameDivision(a, b [][]int) bool { return slices.EqualFunc(a, b, slices.Equal) }

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
	if s.IDs != nil && len(s.IDs) != s.Workers {
		return fmt.Errorf("DiLoCo: %d workers with the replicas %v", s.Workers, s.IDs)
	}
	return nil
}

// Contents converts the snapshot to the form that package checkpoint writes. The tensors are shared, not
// copied.
func (s *Snapshot) Contents() (*checkpoint.Contents, error) {
	full := s.state
	if full.Compress = ""; s.Compress != (compress.Codec{}) {
		full.Compress = s.Compress.String()
	}
	full.Compression = namesOf(s.Compression)
	if full.DiLoCo = nil; s.DiLoCo != nil {
		full.DiLoCo = &outerState{DiLoCo: *s.DiLoCo, Workers: s.Workers, Momentum: namesOf(s.OuterMomentum)}
		known := s.outerState()
		full.DiLoCo.Replicas, full.DiLoCo.IDs, full.DiLoCo.Outer = known.Replicas, known.IDs, known.Outer
	}
	state, err := json.Marshal(s.manifest(&full))
	if err != nil {
		return nil, fmt.Errorf("train: snapshot: %w", err)
	}
	c := &checkpoint.Contents{Step: s.Step, State: state}
	c.Tensors = tensorsOf(slices.Concat(s.Variables, s.Compression, s.OuterMomentum, s.state.Fit.tensors()))
	return c, nil
}

func namesOf(list []Weight) (names []string) {
	for _, w := range list {
		names = append(names, w.Name)
	}
	return names
}

// SnapshotOf converts c, as read by package checkpoint, to a Snapshot. It is the inverse of
// [Snapshot.Contents]. The tensors are shared, not copied.
func SnapshotOf(c *checkpoint.Contents) (*Snapshot, error) {
	s := &Snapshot{}
	state := &s.state
	err := json.Unmarshal(c.State, s.manifest(state))
	if err == nil {
		err = s.check()
	}
	if err == nil && state.Compress != "" {
		s.Compress, err = compress.Parse(state.Compress)
	}
	if err != nil {
		return nil, fmt.Errorf("train: snapshot: its state: %w", err)
	}
	var momentum []string
	if d := state.DiLoCo; d != nil {
		s.DiLoCo, s.Workers, momentum = &d.DiLoCo, d.Workers, d.Momentum
	}
	tensors, err := joinPieces(weightsOf(c.Tensors), state.Divided)
	if err != nil {
		return nil, fmt.Errorf("train: snapshot: %w", err)
	}
	state.Divided = nil
	for _, w := range tensors {
		switch {
		case state.Fit.take(w):
		case slices.Contains(state.Compression, w.Name):
			s.Compression = append(s.Compression, w)
		case slices.Contains(momentum, w.Name):
			s.OuterMomentum = append(s.OuterMomentum, w)
		default:
			s.Variables = append(s.Variables, w)
		}
	}
	return s, nil
}

// check returns an error if the numbers are inconsistent.
func (s *Snapshot) check() error {
	if s.Step < 0 || s.state.Passes < 0 || s.Replicas < 1 || s.GlobalBatch < 1 {
		return fmt.Errorf("invalid: step %d, %d replicas, global batch %d", s.Step, s.Replicas, s.GlobalBatch)
	}
	return cmp.Or(s.state.LossScale.check(), s.state.Fit.check(), s.state.DiLoCo.check())
}

// Snapshot returns the state of training between two steps. In a callback of [Trainer.Fit] it includes Fit's
// position; after [Trainer.Restore] it includes the position at which Fit will resume; otherwise it has no
// position. With several workers, every worker calls it: the chief gets the snapshot, the others get nil. The
// others wait until all have compared the mirrored variables and the chief has gathered what it does not have: the
// averages, what compression keeps for each replica, with DiLoCo the workers' slots, and the slots of a sharded
// optimizer. It is an error if the mirrored variables are not the same on all replicas ([Trainer.CheckMirrored], over
// all workers). The tensors are copies and belong to the caller. With DiLoCo it is an error between two outer steps.
func (t *Trainer) Snapshot(ctx context.Context) (*Snapshot, error) {
	s, err := t.snapshot(ctx)
	if err != nil {
		return nil, err
	}
	for _, v := range t.stateTable() {
		value, err := t.gather(ctx, v, false)
		if err != nil {
			return nil, fmt.Errorf("train: snapshot: reading %s: %w", v.name, err)
		}
		s.add(v, value)
	}
	if !t.IsChief() {
		return nil, nil
	}
	return s, nil
}

// add appends a value of the state table.
func (s *Snapshot) add(v *stateValue, value *tensor.Tensor) {
	list := s.list(v.kind)
	*list = append(*list, Weight{v.name, value})
}

// snapshot returns the state of training without the values of the state table. Every worker calls it.
func (t *Trainer) snapshot(ctx context.Context) (*Snapshot, error) {
	if err := t.diloco.checkEqual(); err != nil {
		return nil, fmt.Errorf("train: snapshot: %w", err)
	}
	t.enter(PhaseSnapshot)
	if err := t.checkAll(ctx); err != nil {
		return nil, fmt.Errorf("%w (found before the snapshot at step %d, which is not written: resume from an earlier one)",
			err, t.committed)
	}
	s := t.position()
	if s.DiLoCo = t.config.diloco(); s.DiLoCo != nil {
		s.Workers, s.state.DiLoCo = len(t.replicasOf), t.outerState()
	}
	return s, nil
}

// position returns the numbers of a snapshot, and the state of Fit.
func (t *Trainer) position() *Snapshot {
	s := &Snapshot{
		Step: t.committed, Seed: t.config.Seed, GlobalBatch: t.config.GlobalBatch,
		Replicas: t.strategy.NumReplicasInSync(), Compress: t.config.Exchange.codec(),
		state: snapshotState{Passes: t.passes, Buckets: t.bucketHashes(), Compute: t.computeName(), Fit: t.resume},
	}
	if scale := t.scale; scale.Scale != 0 {
		s.state.LossScale = &scale
	}
	if f := t.fitting.Load(); f != nil {
		s.state.Fit = f.state()
	}
	return s
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
// gradients have kept for the next step is then divided evenly among the replicas; with another Compress than
// the snapshot's it is dropped, which Restored reports too. With DiLoCo and another number of workers, every worker
// gets the mean of the workers' slots, or the first worker's if they are not floating-point numbers. A snapshot with
// DiLoCo can be restored without it, and the reverse: the slots are then combined in the same way, or the outer
// momentum starts at 0. Restored reports all of it, and with DiLoCo also the same replicas divided otherwise among as
// many workers. On error nothing has changed, unless the engine itself failed.
func (t *Trainer) Restore(ctx context.Context, s *Snapshot) (Restored, error) {
	s, _, err := t.snapshotFromChief(ctx, s, restoreMessage{}, nil)
	if s == nil || err != nil {
		return Restored{}, err
	}
	return t.restore(s)
}

// restore implements Restore once all workers have the snapshot.
func (t *Trainer) restore(s *Snapshot) (Restored, error) {
	table := t.stateTable()
	values, err := t.fitSnapshot(s, table)
	if err == nil {
		err = t.diloco.drop()
	}
	if err != nil {
		return Restored{}, fmt.Errorf("train: restore: %w", err)
	}
	for i, v := range table {
		for local := range t.local {
			if err := v.write(local, values[i][min(local, len(values[i])-1)]); err != nil {
				return Restored{}, fmt.Errorf("train: restore: %w", err)
			}
		}
	}
	t.setPosition(s) // all workers have the snapshot's values now
	t.outer = s.outerState().Outer
	r := Restored{Found: true, Step: s.Step, Differ: t.whyBitsDiffer(s)}
	r.Epoch, r.EpochAt = s.Epoch()
	return r, nil
}

// setPosition sets the numbers of a snapshot, and where Fit resumes.
func (t *Trainer) setPosition(s *Snapshot) {
	t.committed, t.passes, t.resume, t.assigned = s.Step, s.state.Passes, s.state.Fit, assigned{variable: -1}
	t.restoreScale(s)
}

// whyBitsDiffer returns the reasons why the bits of this training differ from those of the training that made the
// snapshot, once it is restored.
func (t *Trainer) whyBitsDiffer(s *Snapshot) (reasons []string) {
	describe := func(d *DiLoCo) string {
		if d == nil {
			return "no DiLoCo"
		}
		return d.String()
	}
	then, now := describe(s.DiLoCo), describe(t.config.diloco())
	division := s.outerState().division()
	switch {
	case then != now:
		reasons = append(reasons, fmt.Sprintf("the snapshot was made with %s, this training has %s", then, now))
	case s.DiLoCo != nil && s.Workers != len(t.replicasOf):
		reasons = append(reasons, fmt.Sprintf("the snapshot was made by %s with an optimizer state each, this training has "+
			"%s: every worker starts with the mean", plural(s.Workers, "worker"), plural(len(t.replicasOf), "worker")))
	case division != nil && !sameDivision(division, t.replicasOf):
		reasons = append(reasons, fmt.Sprintf("the snapshot was made by workers with the replicas %v, this training has "+
			"workers with %v: each trains on another share of a batch, and may have another weight in the outer step", division,
			t.replicasOf))
	}
	n := t.strategy.NumReplicasInSync()
	if n != s.Replicas {
		reasons = append(reasons, fmt.Sprintf("the snapshot was made by %s, this is %s: averages were combined, and sums "+
			"are made in another order", plural(s.Replicas, "replica"), plural(n, "replica")))
	}
	if s.state.Buckets != nil && s.Replicas == n && !slices.Equal(s.state.Buckets, t.bucketHashes()) {
		reasons = append(reasons, "the snapshot was made with other buckets of gradients: an engine may round "+
			"differently: give the same Config.BucketBytes")
	}
	if why := t.otherPrecision(s); why != "" {
		reasons = append(reasons, why)
	}
	if codec := t.config.Exchange.codec(); s.Compress != codec {
		reasons = append(reasons, fmt.Sprintf("the snapshot was made with compression %v, and this training has %v: what "+
			"compression has rounded away and kept for the next step is dropped", s.Compress, codec))
	}
	return reasons
}

// bucketHashes identifies the gradients of each bucket.
func (t *Trainer) bucketHashes() []string {
	hashes := make([]string, len(t.buckets))
	for k, b := range t.buckets {
		hashes[k] = b.hash
	}
	return hashes
}

// fitSnapshot returns, by value of the table, that of each local replica, or a single one if it is the same on all.
// What the exchange keeps begins with zeros if the snapshot does not have it, or has that of another compression.
func (t *Trainer) fitSnapshot(s *Snapshot, table []*stateValue) ([][]*tensor.Tensor, error) {
	if s.Seed != t.config.Seed || s.GlobalBatch != t.config.GlobalBatch {
		return nil, fmt.Errorf("the snapshot was made with seed %d and a global batch of %s, and this training has seed %d "+
			"and %s: it would be a different training; to start from the weights alone, use SetWeights",
			s.Seed, plural(s.GlobalBatch, "example"), t.config.Seed, plural(t.config.GlobalBatch, "example"))
	}
	byName := map[string]*tensor.Tensor{}
	for _, w := range slices.Concat(s.Variables, s.Compression, s.OuterMomentum) {
		byName[w.Name] = w.Value
	}
	used := map[string]bool{}
	values := make([][]*tensor.Tensor, len(table))
	for i, v := range table {
		stored, found := byName[v.name]
		used[v.name] = true
		switch {
		case !found && (v.kind == kindVariable || v.kind == kindSlot):
			return nil, fmt.Errorf("the snapshot has no variable %s: it is of another model or optimizer", v.name)
		case !found || v.kind == kindCompression && s.Compress != t.config.Exchange.codec():
			values[i] = []*tensor.Tensor{tensor.New(v.dtype, v.shape...)}
			continue
		}
		var err error
		if values[i], err = t.values(s, v, stored); err != nil {
			return nil, fmt.Errorf("%s: %w: the snapshot is of another model or optimizer", v.name, err)
		}
	}
	for _, w := range s.Variables {
		if !used[w.Name] {
			return nil, fmt.Errorf("the model has no variable %s: the snapshot is of another model or optimizer", w.Name)
		}
	}
	return values, nil
}

// restoreMessage is the chief's message to the other workers, sent before the tensors.
type restoreMessage struct {
	Restored Restored `json:"restored"`
	Saves    bool     `json:"saves"`
	Anew     bool     `json:"anew"`  // newer snapshots than the restored one exist
	Every    int      `json:"every"` // BackupConfig.EverySteps

	Holder checkpoint.Holder `json:"holder"` // of the folder's lock

	State   json.RawMessage `json:"state,omitempty"` // nil: no snapshot
	Tensors []tensorHeader  `json:"tensors,omitempty"`
}

type tensorHeader struct {
	Name  string       `json:"name"`
	DType tensor.DType `json:"dtype"`
	Shape []int        `json:"shape"`
}

// value returns the tensor with the given bytes as its elements.
func (h tensorHeader) value(bytes []byte) (*tensor.Tensor, error) {
	if !h.DType.Valid() || h.DType == tensor.String {
		return nil, fmt.Errorf("invalid dtype %d: want a numeric dtype", h.DType)
	}
	n := elements(h.Shape)
	if n < 0 {
		return nil, fmt.Errorf("invalid shape %s", tensor.FormatShape(h.Shape))
	}
	if n*h.DType.Bytes() != len(bytes) {
		return nil, fmt.Errorf("got %d bytes for %v%s", len(bytes), h.DType, tensor.FormatShape(h.Shape))
	}
	out := tensor.New(h.DType, h.Shape...)
	copy(out.Memory().HostBytes(), bytes)
	return out, nil
}

// snapshotFromChief sends the chief's snapshot and message to all workers, or the error that the chief failed with.
func (t *Trainer) snapshotFromChief(ctx context.Context, s *Snapshot, message restoreMessage, failure error) (
	*Snapshot, restoreMessage, error,
) {
	if !t.others() {
		return s, message, failure
	}
	t.enter(PhaseRestore)
	chief := t.IsChief()
	var c *checkpoint.Contents
	if chief && failure == nil && s != nil {
		if c, failure = s.Contents(); failure == nil {
			of := messageOf(c)
			message.State, message.Tensors = of.State, of.Tensors
		}
	}
	message, err := fromChief(ctx, t, message, failure)
	switch {
	case failure != nil:
		return nil, message, failure
	case err != nil:
		return nil, message, fmt.Errorf("train: restore: %w", err)
	case message.State == nil:
		return nil, message, nil
	}
	if c, err = t.receiveContents(ctx, message, chief, c); err != nil {
		return nil, message, fmt.Errorf("train: restore: from the chief: %w", err)
	}
	s, err = SnapshotOf(c)
	return s, message, err
}

// messageOf describes the contents that receiveContents sends.
func messageOf(c *checkpoint.Contents) restoreMessage {
	m := restoreMessage{State: c.State}
	for _, v := range c.Tensors {
		m.Tensors = append(m.Tensors, tensorHeader{v.Name, v.Value.DType(), v.Value.Shape()})
	}
	return m
}

// receiveContents returns, on every worker, the contents of the worker that sends.
func (t *Trainer) receiveContents(ctx context.Context, m restoreMessage, sends bool, own *checkpoint.Contents) (
	*checkpoint.Contents, error,
) {
	c := &checkpoint.Contents{State: m.State}
	for i, h := range m.Tensors {
		var mine []byte
		if sends {
			mine = own.Tensors[i].Value.Memory().HostBytes()
		}
		bytes, err := t.fromWorker(ctx, sends, mine)
		var value *tensor.Tensor
		if err == nil {
			value, err = h.value(bytes)
		}
		if err != nil {
			return nil, fmt.Errorf("getting %s: %w", h.Name, err)
		}
		c.Tensors = append(c.Tensors, checkpoint.Tensor{Name: h.Name, Value: value})
	}
	return c, nil
}
