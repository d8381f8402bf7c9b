package train

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Weight is one variable: its name and value.
type Weight struct {
	Name  string         // path in the model; unique
	Value *tensor.Tensor // in host memory
}

// Weights returns the model's weights, sorted by name: all variables except the optimizer's slots. Averages
// are the mean over the replicas, as TensorFlow saves sync-on-read variables. The tensors are copies and
// belong to the caller. With several workers, every worker calls it, because the mean is a collective.
func (t *Trainer) Weights(ctx context.Context) ([]Weight, error) {
	var out []Weight
	for i, v := range t.variables {
		if v.Role == engine.Slot {
			continue
		}
		value, err := t.weight(ctx, i)
		if err != nil {
			return nil, fmt.Errorf("train: reading %s: %w", v.Name, err)
		}
		out = append(out, Weight{v.Name, value})
	}
	slices.SortFunc(out, func(a, b Weight) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// SetWeights sets variables on every replica to the given values, in the form that [Trainer.Weights] returns.
// weights must contain every variable exactly once, except the optimizer's slots, which keep their values.
// The values are copied. On error nothing has changed, unless the engine itself failed. With several workers,
// every worker must call it with the same values, as with [Trainer.SetVariable].
func (t *Trainer) SetWeights(weights []Weight) error {
	byName := make(map[string]*tensor.Tensor, len(weights))
	for _, w := range weights {
		if byName[w.Name] != nil {
			return fmt.Errorf("train: set weights: %s is given twice", w.Name)
		}
		byName[w.Name] = w.Value
	}
	values := make([]*tensor.Tensor, len(t.variables))
	for i, v := range t.variables {
		if v.Role == engine.Slot {
			continue
		}
		value, ok := byName[v.Name]
		if !ok {
			return fmt.Errorf("train: set weights: %s is missing", v.Name)
		}
		if err := fits(value, v.DType, v.Shape); err != nil {
			return fmt.Errorf("train: set weights: %s: %w", v.Name, err)
		}
		values[i] = value
		delete(byName, v.Name)
	}
	for name := range byName {
		return fmt.Errorf("train: set weights: the model has no variable %s", name)
	}
	if err := t.assignAll(values); err != nil {
		return fmt.Errorf("train: set weights: %w", err)
	}
	return nil
}

// assignAll sets the variables that have a value in the list.
func (t *Trainer) assignAll(values []*tensor.Tensor) error {
	for i, value := range values {
		if value == nil {
			continue
		}
		if err := t.assign(i, value); err != nil {
			return err
		}
	}
	return nil
}

// SetVariable sets one variable, of any role, on every replica: for example the optimizer's learning rate,
// which is a slot. The value is copied. A callback may call it between steps. With several workers, every
// worker must call it with the same value; otherwise the next step fails on all workers.
func (t *Trainer) SetVariable(name string, value *tensor.Tensor) error {
	i := slices.IndexFunc(t.variables, func(v engine.Variable) bool { return v.Name == name })
	if i < 0 {
		return fmt.Errorf("train: set variable: the model has no variable %s", name)
	}
	if err := fits(value, t.variables[i].DType, t.variables[i].Shape); err != nil {
		return fmt.Errorf("train: set variable: %s: %w", name, err)
	}
	if err := t.assign(i, value); err != nil {
		return fmt.Errorf("train: set variable: %w", err)
	}
	return nil
}

// WeightsHash returns the SHA-256 of the result of [Trainer.Weights], in hexadecimal. It covers each weight's
// name, dtype, shape and bits, in the order of names. With several workers, every worker calls it.
func (t *Trainer) WeightsHash(ctx context.Context) (string, error) {
	weights, err := t.Weights(ctx)
	if err != nil {
		return "", err
	}
	return HashWeights(weights), nil
}

// HashWeights returns the hash that [Trainer.WeightsHash] defines, for weights that are sorted by name.
func HashWeights(weights []Weight) string {
	h := sha256.New()
	var frame []byte // lengths before contents, so that no two lists of weights give the same bytes
	for _, w := range weights {
		bits := w.Value.Memory().HostBytes()
		frame = binary.LittleEndian.AppendUint64(frame[:0], uint64(len(w.Name)))
		frame = append(frame, w.Name...)
		dtype := w.Value.DType().String()
		frame = binary.LittleEndian.AppendUint64(frame, uint64(len(dtype)))
		frame = append(frame, dtype...)
		frame = binary.LittleEndian.AppendUint64(frame, uint64(w.Value.Rank()))
		for _, d := range w.Value.Shape() {
			frame = binary.LittleEndian.AppendUint64(frame, uint64(d))
		}
		h.Write(frame)
		h.Write(bits)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// CheckMirrored returns an error if the bits of a parameter or an optimizer slot differ between this worker's
// replicas. They differ only if something bypasses the trainer to write to the variables, or the engine is
// not deterministic.
func (t *Trainer) CheckMirrored() error {
	if len(t.devices) == 1 { // which has the only copy of this worker
		return nil
	}
	for i, v := range t.variables {
		if v.Role == engine.Average {
			continue
		}
		var first *tensor.Tensor
		var differ []string
		with := 0
		for local, replica := range t.ids() {
			if !t.hasAll(local, i) {
				continue
			}
			value, err := t.program.Read(local, i)
			if err != nil {
				return fmt.Errorf("train: reading %s on replica %d: %w", v.Name, replica, err)
			}
			if first == nil {
				first, with = value, replica
			} else if !value.Equal(first) {
				differ = append(differ, fmt.Sprintf("replica %d at %s", replica, firstDifference(first, value)))
			}
		}
		if differ != nil {
			return fmt.Errorf("train: the mirrored variable %s is no longer the same on all replicas: against replica %d, %s",
				v.Name, with, strings.Join(differ, "; "))
		}
	}
	return nil
}

// checkAll is CheckMirrored over the replicas of all workers. It compares fingerprints and does not transfer
// the values.
func (t *Trainer) checkAll(ctx context.Context) error {
	if err := t.CheckMirrored(); err != nil || !t.others() {
		if err != nil {
			t.failOthers(ctx, err)
		}
		return err
	}
	prints, err := t.fingerprints()
	if err != nil {
		t.failOthers(ctx, err)
		return err
	}
	all, err := fromWorkers(ctx, t, prints)
	if err != nil {
		return fmt.Errorf("train: comparing the workers' variables: %w", err)
	}
	for i, v := range t.variables {
		if !t.table[i].mirrored {
			continue
		}
		var differ []string
		for replica := range t.strategy.NumReplicasInSync() {
			if all[t.workerOf(replica)][i] != all[t.workerOf(0)][i] {
				differ = append(differ, fmt.Sprint(replica))
			}
		}
		if differ != nil {
			return fmt.Errorf("train: the mirrored variable %s is no longer the same on all workers: the bits of replica 0 "+
				"differ from those of replica %s", v.Name, strings.Join(differ, ", "))
		}
	}
	return nil
}

// verify computes the hash of the mirrored variables, which the workers compare in the next step, if that step is one
// in Config.VerifyEvery. It compares the replicas of this worker.
func (t *Trainer) verify(ctx context.Context) error {
	t.verified = 0
	n := int64(t.config.VerifyEvery)
	if n < 0 || t.committed == 0 || t.committed%n != 0 || t.strategy.NumReplicasInSync() == 1 || t.diloco != nil {
		return nil
	}
	err := t.CheckMirrored()
	if err == nil && t.others() {
		var prints []uint64
		prints, err = t.fingerprints()
		for _, print := range prints {
			t.verified = bits.RotateLeft64(t.verified, 1) ^ print
		}
	}
	if err != nil {
		t.failOthers(ctx, err)
	}
	return err
}

// fingerprints returns a hash (XXH3) of each variable that is the same on all replicas, and 0 for others.
func (t *Trainer) fingerprints() ([]uint64, error) {
	out := make([]uint64, len(t.variables))
	for i, v := range t.variables {
		if !t.table[i].mirrored {
			continue
		}
		value, err := t.program.Read(0, i)
		if err != nil {
			return nil, fmt.Errorf("train: reading %s: %w", v.Name, err)
		}
		out[i] = xxh3.Hash(value.Memory().HostBytes())
	}
	return out, nil
}

// firstDifference describes the first element of b that differs from a.
func firstDifference(a, b *tensor.Tensor) string {
	if a.DType() != b.DType() || !a.SameShape(b) {
		return fmt.Sprintf("type and shape (%v%s, %v%s)", a.DType(), tensor.FormatShape(a.Shape()), b.DType(),
			tensor.FormatShape(b.Shape()))
	}
	x, y, n := a.Memory().HostBytes(), b.Memory().HostBytes(), a.DType().Bytes()
	for i := 0; i < len(x); i += n {
		if string(x[i:i+n]) != string(y[i:i+n]) {
			p, q := a.Reshape(a.Len()).Rows(i/n, i/n+1), b.Reshape(b.Len()).Rows(i/n, i/n+1)
			return fmt.Sprintf("element %d of %d (%s, %s)", i/n, a.Len(), p.Format(), q.Format())
		}
	}
	return "no element"
}
