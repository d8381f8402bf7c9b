// Package typed has collective calls on Go slices and values, for programs without a model. It makes one call of
// package collective for a slice, and two for values of other types. As there, all ranks make the same calls in the
// same order, an error is that of all ranks, and each rank calls from its own goroutine.
package typed

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// AllReduce replaces the elements of x by their reduction over all ranks. x has the same length on all ranks. After
// an error its contents are undefined.
func AllReduce[T tensor.Element](ctx context.Context, c collective.Communicator, by collective.ReduceOp, x []T) error {
	m := tensor.HostMemory(x)
	return c.Do(ctx, &collective.Call{
		Op: collective.AllReduce, Reduce: by, Type: tensor.DTypeOf[T](), Src: m, Dst: m,
	})
}

// Sum replaces the elements of x by their sums over all ranks: AllReduce with [collective.Sum].
func Sum[T tensor.Element](ctx context.Context, c collective.Communicator, x []T) error {
	return AllReduce(ctx, c, collective.Sum, x)
}

// Broadcast replaces the elements of x by those of rank root. x has the same length on all ranks. After an error its
// contents are undefined.
func Broadcast[T tensor.Element](ctx context.Context, c collective.Communicator, root int, x []T) error {
	m := tensor.HostMemory(x)
	return c.Do(ctx, &collective.Call{Op: collective.Broadcast, Root: root, Type: tensor.DTypeOf[T](), Src: m, Dst: m})
}

// Gather returns the values of all ranks, by rank, on every rank. T is a type that encoding/gob can encode, such as a
// struct with exported fields, the same on all ranks. If a rank cannot encode its value, Gather fails on all of them
// with the reason, and later calls of the communicator work.
func Gather[T any](ctx context.Context, c collective.Communicator, value T) ([]T, error) {
	var message bytes.Buffer
	sign := int64(1) // negative: the message is an error
	if err := gob.NewEncoder(&message).Encode(&value); err != nil {
		message.Reset()
		fmt.Fprintf(&message, "rank %d cannot encode a %T: %v", c.Rank(), value, err)
		sign = -1
	}
	all, counts := message.Bytes(), []int(nil)
	lengths, err := allGather(ctx, c, []int64{sign * int64(message.Len())}, nil)
	if err == nil {
		for _, n := range lengths {
			counts = append(counts, int(max(n, -n)))
		}
		all, err = allGather(ctx, c, all, counts)
	}
	if err != nil {
		return nil, err
	}
	values, errs := make([]T, len(counts)), []error(nil)
	for rank, n := range counts {
		text := all[:n]
		all = all[n:]
		if lengths[rank] < 0 {
			errs = append(errs, fmt.Errorf("typed: %s", text))
		} else if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&values[rank]); err != nil {
			errs = append(errs, fmt.Errorf("typed: decoding the %T of rank %d: %w", value, rank, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return values, nil
}

// allGather returns the elements of all ranks: of each as many as counts has, or equally many.
func allGather[T tensor.Element](ctx context.Context, c collective.Communicator, mine []T, counts []int) ([]T, error) {
	total := len(mine) * c.Size()
	if counts != nil {
		total = 0
		for _, n := range counts {
			total += n
		}
	}
	all := make([]T, total)
	return all, c.Do(ctx, &collective.Call{
		Op: collective.AllGather, Type: tensor.DTypeOf[T](), Counts: counts,
		Src: tensor.HostMemory(mine), Dst: tensor.HostMemory(all),
	})
}
