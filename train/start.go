package train

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// startEqual gives all workers the chief's initial values, as TensorFlow's multi-worker strategy does when it makes variables: a model may
// begin with random ones. First it makes sure that the workers mean the same model.
func (t *Trainer) startEqual(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			t.tellOthers(ctx, err)
		}
	}()
	if t.initial, err = t.initialPrint(); err != nil {
		return err
	}
	chief := t.strategy.Properties().ShouldCheckpoint
	mine := t.describe()
	theirs, err := t.fromChief(ctx, chief, []byte(strings.Join(mine, "\n")))
	if err != nil {
		return fmt.Errorf("train: learning from the chief what model it has: %w", err)
	}
	for i, line := range strings.Split(string(theirs), "\n") {
		switch {
		case i >= len(mine):
			return fmt.Errorf("train: this worker has another model than the chief: the chief has also %s", line)
		case mine[i] != line:
			return fmt.Errorf("train: this worker has another model than the chief: %s, where the chief has %s", mine[i], line)
		case i == strings.Count(string(theirs), "\n") && len(mine) > i+1:
			return fmt.Errorf("train: this worker has another model than the chief: it has also %s", mine[i+1])
		}
	}
	for i, v := range t.variables {
		value, err := t.program.Read(0, i)
		if err != nil {
			return fmt.Errorf("train: reading %s: %w", v.Name, err)
		}
		bits, err := t.fromChief(ctx, chief, value.Memory().HostBytes())
		if err != nil {
			return fmt.Errorf("train: getting the initial value of %s from the chief: %w", v.Name, err)
		}
		copy(value.Memory().HostBytes(), bits)
		for replica := range t.parts {
			if err := t.program.Write(replica, i, value); err != nil {
				return fmt.Errorf("train: setting %s on replica %d: %w", v.Name, replica, err)
			}
		}
	}
	return nil
}

// describe says in a line each what must be the same on all workers, or their steps do not fit together.
func (t *Trainer) describe() []string {
	out := []string{
		fmt.Sprintf("global batches of %d", t.config.GlobalBatch), fmt.Sprintf("seed %d", t.config.Seed), fmt.Sprintf("%d packs", len(t.packs)), fmt.Sprintf("metrics %q", t.metrics),
	}
	for _, v := range t.variables {
		out = append(out, fmt.Sprintf("the %s %q of %v%s", roleNames[v.Role], v.Name, v.DType, tensor.FormatShape(v.Shape)))
	}
	return out
}

// initialPrint is the first bits of a hash of all values that the model begins with here.
func (t *Trainer) initialPrint() (uint64, error) {
	prints, err := t.fingerprints()
	if err != nil {
		return 0, err
	}
	var b []byte
	for _, p := range prints {
		b = binary.LittleEndian.AppendUint64(b, uint64(p))
	}
	sum := sha256.Sum256(b)
	return binary.LittleEndian.Uint64(sum[:]), nil
}

// chiefError is a failure of the chief's, as the other workers learn of it.
type chiefError struct{ text string }

func (e *chiefError) Error() string { return "train: restore: on the chief: " + e.text }

// FromWorker says whose failure it is (see worker.Worker.Fail).
func (e *chiefError) FromWorker() int { return 0 }
