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
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Stop asks to end early what the trainer does. It may be called from any goroutine, for a signal. A
// [Trainer.Fit] in progress ends as by [ErrStop] from a callback after the step in progress, an
// [Trainer.Evaluate] in progress returns ErrStop. If neither is in progress, or too close to its end, Stop ends
// the next one. It ends one of them only: what is called after that runs as if Stop had not been called. With
// several workers it is enough that one of them calls it.
func (t *Trainer) Stop() { t.stopping.Store(true) }

// others reports whether there are other workers.
func (t *Trainer) others() bool {
	_, local := t.strategy.LocalReplicas()
	return t.strategy.NumReplicasInSync() > local
}

// wantsStop reports whether the other workers are to be told that this one wants to stop.
func (t *Trainer) wantsStop() bool { return t.others() && (t.wish || t.stopping.Load()) }

// stopAgreed reports whether any worker wanted to stop when the last batch began.
func (t *Trainer) stopAgreed() bool {
	return tensor.Data[float64](t.parts[0].global[0])[1+len(t.metrics)+agreedStop] > 0
}

// place is where a batch comes from: which pass over the dataset, and which batch of it, from 0.
type place struct{ pass, batch int }

// What the workers of a step must agree on travels with loss and metrics, as further elements of that vector, which is
// summed up over the replicas.
const (
	agreedStop      = iota                         // how many replicas' workers want to stop
	agreedNotFinite                                // how many replicas have found a sum of gradients that is not finite
	agreedSums                                     // of the pieces of a hash of each replica's stepState
	agreedSquares   = agreedSums + agreedPieces    // of the same pieces, squared
	agreed          = agreedSquares + agreedPieces // how many elements these are
)

// agreedPieces is into how many pieces the hash is cut.
const agreedPieces = 3

// pieceBits returns how many bits a piece has: as many as the sum of all replicas' squares leaves exact in a float64,
// at most a third of the hash.
func pieceBits(replicas int) int { return min(22, (53-bits.Len(uint(replicas-1)))/2) }

// putAgreement writes what this worker has to say about the batch.
func (t *Trainer) putAgreement(g *globalBatch, to []float64) {
	clear(to[:agreed])
	if g.stop {
		to[agreedStop] = 1
	}
	if t.others() {
		putHash(t.stepState(g).hash(), t.strategy.NumReplicasInSync(), to)
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

// sameHash reports whether all replicas have written the same hash. n numbers are equal if and only if n times the sum
// of their squares is the square of their sum.
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

// checkAgreement returns an error unless the states of all replicas' workers have the same hash. All replicas come to
// the same outcome. If it is an error they gather their states, so that all know what differs where.
func (t *Trainer) checkAgreement(ctx context.Context, r *distribute.Replica, g *globalBatch, sums []float64) error {
	if !t.others() || sameHash(sums, r.NumReplicas()) {
		return nil
	}
	if err := t.compareStates(ctx, r, g); err != nil {
		return err
	}
	return errors.New("the collectives do not add up float64 exactly: sums of small whole numbers over all replicas are wrong")
}

// compareStates gathers the states of all replicas' workers and returns an error that says how they differ, or nil if
// they do not.
func (t *Trainer) compareStates(ctx context.Context, r *distribute.Replica, g *globalBatch) error {
	mine := make([]int64, stateFields)
	for i, x := range t.stepState(g) {
		mine[i] = int64(x)
	}
	rows, err := r.AllGather(ctx, tensor.From(mine, 1, len(mine)), 0)
	if err != nil {
		return fmt.Errorf("the workers do not make the same step, and cannot compare what differs: %w", err)
	}
	all := tensor.Data[int64](rows.(*tensor.Tensor))
	var workers []stepState
	for len(all) > 0 {
		var s stepState
		for i := range s {
			s[i] = uint64(all[i])
		}
		if all = all[stateFields:]; len(workers) == 0 || workers[len(workers)-1][stateFirst] != s[stateFirst] {
			workers = append(workers, s)
		}
	}
	return t.difference(workers)
}

// The fields of a [stepState].
const (
	stateSteps    = iota // made before
	statePass            // over the dataset, from 0
	stateBatch           // of the pass, from 0
	stateExamples        // of the global batch
	stateInputs          // their hash
	stateLabels          // their hash
	stateWeights         // their hash
	stateAssigned        // hash of the values that variables were set to between steps
	stateFirst           // the worker's first replica
	stateVariable        // the variable that was set last: its index and 1, or 0
	stateFields          // the number of fields

	stateMustAgree = stateFirst // so many fields, from the first
)

// stepState is what a worker makes a step from. All workers must have the same.
type stepState [stateFields]uint64

func (t *Trainer) stepState(g *globalBatch) stepState {
	return stepState{
		stateSteps:    uint64(t.committed),
		statePass:     uint64(g.place.pass),
		stateBatch:    uint64(g.place.batch),
		stateExamples: uint64(g.examples),
		stateInputs:   g.content.inputs,
		stateLabels:   g.content.labels,
		stateWeights:  g.content.weights,
		stateAssigned: t.assigned.hash,
		stateFirst:    uint64(g.first),
		stateVariable: uint64(t.assigned.variable + 1),
	}
}

// hash is over what must agree.
func (s stepState) hash() uint64 {
	var b [8 * stateMustAgree]byte
	for i, x := range s[:stateMustAgree] {
		binary.LittleEndian.PutUint64(b[8*i:], x)
	}
	return xxh3.Hash(b[:])
}

// difference says how the states of the workers differ. It is nil if they do not.
func (t *Trainer) difference(workers []stepState) error {
	same := func(a, b stepState) bool { return slices.Equal(a[:stateMustAgree], b[:stateMustAgree]) }
	most, reference := 0, 0 // what most workers have is right; if as many have something else, what the first has
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
	for w := range workers { // those that differ in the same way
		wrong = slices.DeleteFunc(wrong, func(x int) bool { return x == w && !same(workers[w], a) })
	}
	text := t.describeDifference(ranges.Text("worker", wrong), ranges.Text("worker", right), a, b)
	return fmt.Errorf("the workers do not make the same step: %s", text)
}

// describeDifference says what the workers named wrong, with state a, have, and what those named right, with state b.
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
		return fmt.Sprintf("%s made %d steps before it, %s %d. Call Fit, ApplyGradients and Restore on all workers alike",
			wrong, a[stateSteps], right, b[stateSteps])
	case a[statePass] != b[statePass] || a[stateBatch] != b[stateBatch]:
		return fmt.Sprintf("%s: batch %d of pass %d over the data, %s: %s",
			wrong, a[stateBatch]+1, a[statePass]+1, right, batch) + sameData
	case a[stateExamples] != b[stateExamples]:
		return fmt.Sprintf("%s: %d examples in %s over the data, %s: %d",
			wrong, a[stateExamples], batch, right, b[stateExamples]) + sameData
	case kinds != nil:
		return fmt.Sprintf("%s read other %s than %s in %s over the data, of %d examples",
			wrong, strings.Join(kinds, " and "), right, batch, b[stateExamples]) + sameData
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

// assigned is what variables were set to between steps, by calls that every worker must make alike.
type assigned struct {
	hash     uint64 // of all names and values, in order of the calls
	variable int    // the last one; -1: none
}

// assign sets a variable on every replica. A mirrored one that has the value already, on all workers then, is not set.
func (t *Trainer) assign(variable int, value *tensor.Tensor) error {
	v := t.variables[variable]
	changes := true
	if t.others() && v.Role != engine.Average {
		old, err := t.program.Read(0, variable)
		if err != nil {
			return fmt.Errorf("%s: %w", v.Name, err)
		}
		changes = !old.Equal(value)
	}
	for replica := range t.parts {
		if err := t.program.Write(replica, variable, value); err != nil {
			return fmt.Errorf("%s on replica %d: %w", v.Name, replica, err)
		}
	}
	if changes {
		name := xxh3.HashStringSeed(v.Name, t.assigned.hash)
		t.assigned = assigned{xxh3.HashSeed(value.Memory().HostBytes(), name), variable}
	}
	return nil
}

// content is what a global batch holds, hashed.
type content struct{ inputs, labels, weights uint64 }

// contentOf hashes all rows of a batch, those of other workers' replicas too. labels says that labels and weights are
// looked at.
func contentOf(b data.Batch, labels bool) content {
	c := content{inputs: hashTensors(b.Inputs)}
	if labels {
		c.labels = hashTensors(b.Labels)
		if notOne := func(w float32) bool { return w != 1 }; b.Weights != nil && // weights of 1 are as none
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

// tellOthers ends with err what other workers wait for, or will wait for next, if there are any. What fails inside a step needs no
// such call.
func (t *Trainer) tellOthers(ctx context.Context, err error) {
	if !t.others() {
		return
	}
	_, _ = distribute.Run(context.WithoutCancel(ctx), t.strategy, func(context.Context, *distribute.Replica, ...distribute.Value) (distribute.Value, error) {
		return nil, told{err} // and so it does
	})
}

// told is an error that the others are told of by a step that does nothing else: nobody needs to know of that step.
type told struct{ error }

func (t told) Unwrap() error { return t.error }

// Plain returns the error alone (see worker.Worker.Fail).
func (t told) Plain() error { return t.error }
