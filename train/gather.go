package train

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// fromWorkers returns one message of each worker, by the worker's number, on every worker.
func fromWorkers[T any](ctx context.Context, t *Trainer, mine T) ([]T, error) {
	if !t.others() {
		return []T{mine}, nil
	}
	text, err := encodeMessage(mine)
	if err != nil {
		return nil, err
	}
	all, err := t.fromWorker(ctx, true, text)
	if err != nil {
		return nil, err
	}
	return messagesByWorker[T](t, all)
}

// messagesByWorker decodes one message of each worker, which are in the order of the workers' first replicas.
func messagesByWorker[T any](t *Trainer, text []byte) ([]T, error) {
	list, err := decodeMessages[T](text)
	if err == nil && len(list) != len(t.replicasOf) {
		err = fmt.Errorf("got %d messages of %s", len(list), plural(len(t.replicasOf), "worker"))
	}
	if err != nil {
		return nil, err
	}
	order := make([]int, len(list))
	for w := range order {
		order[w] = w
	}
	slices.SortFunc(order, func(v, w int) int { return t.replicasOf[v][0] - t.replicasOf[w][0] })
	byWorker := make([]T, len(list))
	for i, worker := range order {
		byWorker[worker] = list[i]
	}
	return byWorker, nil
}

// byReplica returns the values of all replicas, in the order of their ids, of lists by worker and local replica.
func byReplica[T any](t *Trainer, byWorker [][]T) []T {
	all := make([]T, t.strategy.NumReplicasInSync())
	for worker, ids := range t.replicasOf {
		for local, id := range ids {
			all[id] = byWorker[worker][local]
		}
	}
	return all
}

// fromChief returns the chief's message on every worker, or an error if the chief has failed. The chief then gets its
// failure, as it is.
func fromChief[T any](ctx context.Context, t *Trainer, mine T, failure error) (T, error) {
	type outcome struct {
		Message T      `json:"message"`
		Failure string `json:"failure,omitempty"`
	}
	if !t.others() {
		return mine, failure
	}
	its := outcome{Message: mine}
	if failure != nil {
		its.Failure = failure.Error()
	}
	var text []byte
	var err error
	if t.IsChief() {
		text, err = encodeMessage(its)
	}
	if err == nil {
		text, err = t.fromWorker(ctx, t.IsChief(), text)
	}
	if err == nil {
		its = outcome{}
		err = json.Unmarshal(text, &its)
	}
	switch {
	case failure != nil:
		return its.Message, failure
	case err != nil:
		return its.Message, fmt.Errorf("receiving the chief's message: %w", err)
	case its.Failure != "":
		return its.Message, &chiefError{its.Failure}
	}
	return its.Message, nil
}

// chiefError is a failure on the chief, as the other workers receive it.
type chiefError struct{ text string }

func (e *chiefError) Error() string { return "on the chief: " + e.text }

// FromWorker returns the worker that failed (see worker.Worker.Fail): 0, the chief.
func (e *chiefError) FromWorker() int { return 0 }

// toChief returns, on the chief, one message of each worker, by the worker's number. Other workers get nil.
func toChief[T any](ctx context.Context, t *Trainer, name string, mine T) ([]T, error) {
	if !t.others() {
		return []T{mine}, nil
	}
	text, err := encodeMessage(mine)
	if err != nil {
		return nil, err
	}
	lengths, err := fromWorkers(ctx, t, len(text))
	if err != nil {
		return nil, err
	}
	counts := make([]int, t.strategy.NumReplicasInSync())
	for worker, n := range lengths {
		counts[t.replicasOf[worker][0]] = n
	}
	values := slices.Repeat([]*tensor.Tensor{tensor.New(tensor.Uint8, 0)}, len(t.local))
	values[0] = tensor.From(text)
	all, err := t.concatenate(ctx, name, values, counts, 0)
	if err != nil || all == nil {
		return nil, err
	}
	return messagesByWorker[T](t, tensor.Data[uint8](all))
}

// fromReplicas returns one message of each replica that r communicates with, in their order, on all of them.
func fromReplicas[T any](ctx context.Context, r *distribute.Replica, mine T) ([]T, error) {
	text, err := encodeMessage(mine)
	if err != nil {
		return nil, err
	}
	all, err := distribute.AllGather(ctx, r, tensor.From(text), 0)
	if err != nil {
		return nil, err
	}
	return decodeMessages[T](tensor.Data[uint8](all))
}

// encodeMessage ends a message by a newline, so that two numbers, one after the other, stay two.
func encodeMessage(message any) ([]byte, error) {
	text, err := json.Marshal(message)
	return append(text, '\n'), err
}

func decodeMessages[T any](text []byte) (list []T, err error) {
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		var message T
		switch err := d.Decode(&message); {
		case errors.Is(err, io.EOF):
			return list, nil
		case err != nil:
			return nil, err
		}
		list = append(list, message)
	}
}

// fromWorker returns, on every worker, the bytes of the worker that sends; if several do, one after the other in the
// order of their first replicas. The caller must not modify them.
func (t *Trainer) fromWorker(ctx context.Context, sends bool, mine []byte) ([]byte, error) {
	values := slices.Repeat([]*tensor.Tensor{tensor.New(tensor.Uint8, 0)}, len(t.deviceOf))
	if sends {
		values[0] = tensor.From(mine)
	}
	all, err := distribute.Gather(ctx, t.strategy, values, 0)
	if err != nil {
		return nil, err
	}
	return tensor.Data[uint8](all), nil
}

// chiefReplica returns the chief's first replica.
func (t *Trainer) chiefReplica() int { return t.replicasOf[0][0] }

// everywhere is where all workers get the result of concatenate.
const everywhere = -1

// concatenate returns the vectors of all replicas, one after the other in the order of the replicas' ids: everywhere,
// or on one worker only, where the others get nil. values has those of the local replicas, counts the lengths of all.
func (t *Trainer) concatenate(ctx context.Context, name string, values []*tensor.Tensor, counts []int, worker int,
) (all *tensor.Tensor, err error) {
	if worker == everywhere && t.others() {
		return distribute.Gather(ctx, t.strategy, values, 0)
	}
	if worker == t.worker || !t.others() {
		n := 0
		for _, count := range counts {
			n += count
		}
		all = tensor.New(values[0].DType(), n)
	}
	if !t.others() {
		to := all.Memory().HostBytes()
		for _, v := range values {
			to = to[copy(to, v.Memory().HostBytes()):]
		}
		return all, nil
	}
	return all, t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
		h, err := r.StartGather(ctx, all, values[r.LocalID()], counts, t.replicasOf[worker][0], name)
		if err == nil {
			err = h.Wait(ctx)
		}
		return err
	})
}

// ids returns the ids of this worker's replicas, by local number.
func (t *Trainer) ids() []int { return t.replicasOf[t.worker] }

// localOf returns the local number of a replica, or -1 if it is another worker's.
func (t *Trainer) localOf(replica int) int { return slices.Index(t.ids(), replica) }

// workerOf returns the worker that has a replica.
func (t *Trainer) workerOf(replica int) int {
	return slices.IndexFunc(t.replicasOf, func(ids []int) bool { return slices.Contains(ids, replica) })
}

// write sets a variable on this worker's replicas: to one value on all, or to one on each. It does not record it
// for the workers to compare.
func (t *Trainer) write(variable int, values ...*tensor.Tensor) error {
	for local := range t.local {
		if err := t.writeTo(local, variable, values[min(local, len(values)-1)]); err != nil {
			return err
		}
	}
	return nil
}

// writeTo sets a variable on a local replica.
func (t *Trainer) writeTo(local, variable int, value *tensor.Tensor) error {
	t.access.Lock()
	defer t.access.Unlock()
	if err := t.program.Write(local, variable, value); err != nil {
		return fmt.Errorf("setting %s on replica %d: %w", t.variables[variable].Name, t.ids()[local], err)
	}
	return nil
}
