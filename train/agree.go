package train

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Stop requests an early end of the current Fit or Evaluate. Any goroutine may call it, for example on a
// signal. A [Trainer.Fit] in progress ends after the current step, as if a callback had returned [ErrStop]. A
// [Trainer.Evaluate] in progress returns ErrStop. If neither is in progress, or it is too close to its end,
// Stop ends the next one. Each call ends only one of them; later calls run normally. With several workers,
// one worker's Stop stops all of them.
func (t *Trainer) Stop() { t.stopping.Store(true) }

// others reports whether the job has other workers.
func (t *Trainer) others() bool { return len(t.replicasOf) > 1 }

// wantsStop reports whether this worker has a stop request to send to the other workers.
func (t *Trainer) wantsStop() bool { return t.others() && (t.stopRequested || t.stopping.Load()) }

// stopAgreed reports whether any worker had requested a stop when the last batch began.
func (t *Trainer) stopAgreed() bool {
	return t.local[0].scalars[1+t.sums+agreedStop] > 0
}

// batchPosition is the position of a batch in the dataset: the pass, and the batch within it, both from 0.
type batchPosition struct{ pass, batch int }

// The values that workers compare in a step are additional elements of the vector of loss and metrics, which
// is summed over the replicas.
const (
	agreedStop    = iota                         // number of replicas whose worker requests a stop
	agreedSums                                   // sums of the pieces of the hash of each replica's stepState
	agreedSquares = agreedSums + agreedPieces    // sums of the squares of these pieces
	agreedRead    = agreedSquares + agreedPieces // sums of the two halves of the identities of the rows read
	agreedRow     = agreedRead + 2               // differences of the two halves of the contents of one row, read twice
	agreedWriting = agreedRow + 2                // number of replicas whose worker is writing its part of a snapshot
	agreedPlace   = agreedWriting + 1            // number of replicas whose worker has a new placement
	agreed        = agreedPlace + 1              // the number of these elements
)

// agreedPieces is the number of pieces that the hash is split into.
const agreedPieces = 3

// pieceBits returns the number of bits of a piece: as many as keep the sum of all replicas' squares exact in
// a float64, and at most a third of the hash.
func pieceBits(replicas int) int { return min(22, (53-bits.Len(uint(replicas-1)))/2) }

// putAgreement writes this worker's values about a step, for the workers to compare.
func (t *Trainer) putAgreement(r *distribute.Replica, b *stepBatches, to []float64) {
	clear(to[:agreed])
	if b.stop {
		to[agreedStop] = 1
	}
	if t.writing() {
		to[agreedWriting] = 1
	}
	if b.place {
		to[agreedPlace] = 1
	}
	if t.others() {
		putHash(t.stateHash(b), t.strategy.NumReplicasInSync(), to)
		for _, g := range b.list {
			g.identity.put(t.replicaID(r), r.LocalID(), to)
		}
	}
}

// putHash writes one replica's hash.
func putHash(hash uint64, replicas int, to []float64) {
	width := pieceBits(replicas)
	for i := range agreedPieces {
		piece := float64(hash >> (i * width) & (1<<width - 1))
		to[agreedSums+i], to[agreedSquares+i] = piece, piece*piece
	}
}

// sameHash reports whether all replicas wrote the same hash. n numbers are equal if and only if n times the
// sum of their squares equals the square of their sum.
func sameHash(sums []float64, replicas int) bool {
	for i := range agreedPieces {
		sum, squares := uint64(sums[agreedSums+i]), uint64(sums[agreedSquares+i])
		hi, lo := bits.Mul64(uint64(replicas), squares)
		sumHi, sumLo := bits.Mul64(sum, sum)
		if hi != sumHi || lo != sumLo {
			return false
		}
	}
	return true
}

// checkAgreement returns an error unless the states of all replicas' workers have the same hash, after the
// scalars are reduced. All replicas get the same result. If the hashes differ, the replicas gather their states,
// so that every worker can report what differs and where.
func (t *Trainer) checkAgreement(ctx context.Context, r *distribute.Replica, b *stepBatches) error {
	if !t.others() {
		return nil
	}
	return t.checkAgreed(ctx, r, b, t.local[r.LocalID()].scalars[1+t.sums:])
}

// checkAgreed is checkAgreement of the sums of the values that putAgreement wrote.
func (t *Trainer) checkAgreed(ctx context.Context, r *distribute.Replica, b *stepBatches, sums []float64) error {
	same := sameHash(sums, r.NumReplicas())
	if same && t.rightRows(r, b, sums) {
		return nil
	}
	if !same {
		return t.compareStates(ctx, r, t.stepStates(b))
	}
	if err := t.compareRows(ctx, r, b); err != nil {
		return err
	}
	return errInexact
}

// errInexact is the error of workers whose states are equal, and the sums of their hashes are not.
var errInexact = errors.New("the collectives do not add up float64 exactly: sums of small whole numbers over " +
	"all replicas are wrong")

// stepStates returns the states of the batches of a step.
func (t *Trainer) stepStates(b *stepBatches) []stepState {
	list := make([]stepState, len(b.list))
	for i, g := range b.list {
		list[i] = t.stepState(g)
	}
	return list
}

// compareStates gathers the states of all replicas' workers, one per batch. It returns an error that describes their
// differences, or errInexact if they are equal.
func (t *Trainer) compareStates(ctx context.Context, r *distribute.Replica, states []stepState) error {
	if r.LocalID() > 0 { // a worker's other replicas have the same states
		states = nil
	}
	all, err := fromReplicas(ctx, r, states)
	if err != nil {
		return fmt.Errorf("the workers are not at the same step, and comparing their states failed: %w", err)
	}
	if !t.withOthers(r) {
		return errInexact // one worker has one state
	}
	workers := make([][]stepState, len(t.replicasOf))
	for w, ids := range t.replicasOf {
		workers[w] = all[ids[0]]
	}
	batches := slices.MinFunc(workers, func(a, b []stepState) int { return len(a) - len(b) })
	for i := range batches {
		states := make([]stepState, len(workers))
		for w := range workers {
			states[w] = workers[w][i]
		}
		if err := t.difference(states); err != nil {
			return err
		}
	}
	for w, states := range workers {
		if len(states) != len(workers[0]) {
			return fmt.Errorf("the workers do not make the same step: %w",
				accumulateError(w, len(states), len(workers[0])))
		}
	}
	return errInexact
}

// compareWorkers returns an error if workers accumulate different numbers of batches: the all-reduces of their models
// would not match, before any step is compared. All workers get the same result.
func (f *fit) compareWorkers(ctx context.Context) error {
	list, err := fromWorkers(ctx, f.t, f.cfg.Accumulate)
	if err != nil {
		return fmt.Errorf("train: comparing the workers' configurations: %w", err)
	}
	for w, n := range list {
		if n != list[0] {
			return fmt.Errorf("train: the workers do not make the same steps: %w", accumulateError(w, n, list[0]))
		}
	}
	return nil
}

// accumulateError describes a worker that accumulates another number of batches than worker 0.
func accumulateError(worker, n, first int) error {
	return fmt.Errorf("worker %d accumulates the gradients of %d batches, worker 0 of %d. Call Fit on all workers with "+
		"the same data and configuration", worker, n, first)
}

// The fields of a [stepState].
const (
	stateSteps    = iota // steps taken before
	statePass            // over the dataset, from 0
	stateBatch           // of the pass, from 0
	stateExamples        // of the global batch
	stateInputs          // their hash
	stateLabels          // their hash
	stateWeights         // their hash
	stateOrder           // if only rows were read: the hash of the identities of all examples, as the order predicts them
	stateData            // and the fingerprint of the dataset
	stateMirrored        // hash of the variables that all workers have, before every [Config.VerifyEvery]-th step
	stateAssigned        // hash of the values that variables were set to between steps
	stateVariable        // the variable that was set last: its index and 1, or 0
	stateFields          // the number of fields

	stateMustAgree = stateVariable // number of fields, from the first, that must be equal
)

// stepState identifies one batch of a step. It must be the same on all workers.
type stepState [stateFields]uint64

func (t *Trainer) stepState(g *globalBatch) stepState {
	return stepState{
		stateSteps:    uint64(t.committed),
		statePass:     uint64(g.position.pass),
		stateBatch:    uint64(g.position.batch),
		stateExamples: uint64(g.examples),
		stateInputs:   g.content.inputs,
		stateLabels:   g.content.labels,
		stateWeights:  g.content.weights,
		stateOrder:    g.identity.order,
		stateData:     g.identity.data,
		stateMirrored: t.verified,
		stateAssigned: t.assigned.hash,
		stateVariable: uint64(t.assigned.variable + 1),
	}
}

// addHash adds the fields that must be equal to a hash.
func (s stepState) addHash(hash uint64) uint64 {
	var b [8 * stateMustAgree]byte
	for i, x := range s[:stateMustAgree] {
		binary.LittleEndian.PutUint64(b[8*i:], x)
	}
	return xxh3.HashSeed(binary.LittleEndian.AppendUint64(nil, xxh3.Hash(b[:])), hash)
}

// stateHash returns the hash of the fields that must be equal, of all batches of a step.
func (t *Trainer) stateHash(b *stepBatches) (hash uint64) {
	for _, g := range b.list {
		hash = t.stepState(g).addHash(hash)
	}
	return hash
}

// difference returns an error that describes how the workers' states differ, or nil if they are equal.
func (t *Trainer) difference(workers []stepState) error {
	same := func(a, b stepState) bool { return slices.Equal(a[:stateMustAgree], b[:stateMustAgree]) }
	most, reference := 0, 0 // the most common state is the reference; on a tie, the state of the lowest worker
	for w, s := range workers {
		n := 0
		for _, other := range workers {
			if same(s, other) {
				n++
			}
		}
		if n > most {
			most, reference = n, w
		}
	}
	var right, wrong []int
	for w, s := range workers {
		if same(s, workers[reference]) {
			right = append(right, w)
		} else {
			wrong = append(wrong, w)
		}
	}
	if wrong == nil {
		return nil
	}
	a, b := workers[wrong[0]], workers[reference]
	for w := range workers { // workers that differ in the same way
		wrong = slices.DeleteFunc(wrong, func(x int) bool { return x == w && !same(workers[w], a) })
	}
	text := t.describeDifference(ranges.Text("worker", wrong), ranges.Text("worker", right), a, b)
	return fmt.Errorf("the workers do not make the same step: %s", text)
}

// describeDifference describes state a, of the workers named wrong, against state b, of those named right.
func (t *Trainer) describeDifference(wrong, right string, a, b stepState) string {
	const sameData = ". All workers must read the same global batches in the same order, " +
		"of which the strategy gives every replica its share: " +
		"use the same files, shuffle seed, random changes and weights, and no Shard"
	batch := fmt.Sprintf("batch %d of pass %d", b[stateBatch]+1, b[statePass]+1)
	var kinds []string
	for _, kind := range []struct {
		field int
		name  string
	}{{stateInputs, "inputs"}, {stateLabels, "labels"}, {stateWeights, "weights"}} {
		if a[kind.field] != b[kind.field] {
			kinds = append(kinds, kind.name)
		}
	}
	switch {
	case a[stateSteps] != b[stateSteps]:
		return fmt.Sprintf("%s took %d steps before it, %s %d. Call Fit, ApplyGradients and Restore on all workers in the "+
			"same order",
			wrong, a[stateSteps], right, b[stateSteps])
	case a[statePass] != b[statePass] || a[stateBatch] != b[stateBatch]:
		return fmt.Sprintf("%s: batch %d of pass %d over the data, %s: %s",
			wrong, a[stateBatch]+1, a[statePass]+1, right, batch) + sameData
	case a[stateExamples] != b[stateExamples]:
		return fmt.Sprintf("%s: %d examples in %s over the data, %s: %d",
			wrong, a[stateExamples], batch, right, b[stateExamples]) + sameData
	case (a[stateOrder] == 0) != (b[stateOrder] == 0):
		return fmt.Sprintf("%s and %s have different datasets in %s over the data: only one of them has weights, or random "+
			"access to its rows", wrong, right, batch) + sameData
	case a[stateOrder] != b[stateOrder]:
		return fmt.Sprintf("%s read other examples than %s in %s over the data, of %d examples",
			wrong, right, batch, b[stateExamples]) + sameData
	case a[stateData] != b[stateData]:
		return fmt.Sprintf("%s has other data than %s, found in %s: the contents of the source, or a stage of the pipeline "+
			"or its seed, differ", wrong, right, batch) + sameData
	case kinds != nil:
		return fmt.Sprintf("%s read other %s than %s in %s over the data, of %d examples",
			wrong, strings.Join(kinds, " and "), right, batch, b[stateExamples]) + sameData
	case a[stateAssigned] == b[stateAssigned] && a[stateMirrored] != b[stateMirrored]:
		return fmt.Sprintf("after %d steps the bits of the variables of %s differ from those of %s. Unless the program has "+
			"written to them, the memory or a processor of a host has changed bits: test the host by lockstep doctor, and "+
			"resume from the last snapshot without it", b[stateSteps], wrong, right)
	}
	var set []string
	for _, s := range []struct {
		who string
		stepState
	}{{wrong, a}, {right, b}} {
		if v := s.stepState[stateVariable]; v > 0 && v <= uint64(len(t.variables)) {
			set = append(set, fmt.Sprintf("%s last %s", s.who, t.variables[v-1].Name))
		} else {
			set = append(set, s.who+" none")
		}
	}
	return fmt.Sprintf("variables were set between steps on some workers only, or to other values: %s. "+
		"Call SetVariable and SetWeights on all workers, with the same values", strings.Join(set, ", "))
}

// assigned records the values that variables were set to between steps, by calls that must be the same on
// every worker.
type assigned struct {
	hash     uint64 // of all names and values, in call order
	variable int    // the last one; -1: none
}

// content holds the hashes of the parts of a global batch.
type content struct{ inputs, labels, weights uint64 }

// contentOf hashes all rows of a batch, including those of other workers' replicas. labels reports whether
// labels and weights are used, and so hashed.
func contentOf(b data.Batch, labels bool) content {
	c := content{inputs: hashTensors(b.Inputs)}
	if labels {
		c.labels = hashTensors(b.Labels)
		if notOne := func(w float32) bool { return w != 1 }; b.Weights != nil && // weights of 1 equal no weights
			slices.ContainsFunc(tensor.Data[float32](b.Weights), notOne) {
			c.weights = hashTensors([]*tensor.Tensor{b.Weights})
		}
	}
	return c
}

func hashTensors(list []*tensor.Tensor) (h uint64) {
	for _, x := range list {
		h = xxh3.HashSeed(x.Memory().HostBytes(), h)
	}
	return h
}

// failOthers reports err to the other workers, if any: their current or next collective ends with it. A
// failure inside a step is reported anyway and needs no such call.
func (t *Trainer) failOthers(ctx context.Context, err error) {
	if !t.others() {
		return
	}
	_, _ = distribute.Run(context.WithoutCancel(ctx), t.strategy,
		func(context.Context, *distribute.Replica, struct{}) (struct{}, error) {
			return struct{}{}, failureReport{err}
		}, nil)
}

// failureReport is an error that is sent to the other workers by a step that does nothing else. Errors omit
// that step.
type failureReport struct{ error }

func (t failureReport) Unwrap() error { return t.error }

// Plain returns the error alone (see worker.Worker.Fail).
func (t failureReport) Plain() error { return t.error }
