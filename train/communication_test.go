package train

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

// TestCommunicationTime checks that measuring the communication of a step makes its calls and changes no bit of a
// training, compressed or not, sharded or not.
func TestCommunicationTime(t *testing.T) {
	for _, test := range []struct {
		codec string
		shard Exchange
	}{
		{"none", AllReduce{}},
		{"none", Sharded{}},
		{"bfloat16", Sharded{}},
		{"int8", AllReduce{}},
		{"powersgd:2", AllReduce{}},
	} {
		codec, shard := test.codec, test.shard
		_, want := (&compressed{codec: codec, steps: 2, shard: shard}).alone(t, 2)
		measured := compressed{codec: codec, steps: 2, shard: shard, before: func(ctx context.Context, t *Trainer) error {
			if d, err := t.CommunicationTime(ctx, 3); err != nil || d <= 0 {
				return fmt.Errorf("CommunicationTime = %v, %v; want a positive duration", d, err)
			}
			return nil
		}}
		if _, got := measured.alone(t, 2); got != want {
			t.Errorf("%s, sharding %v: a training after CommunicationTime has hash %s, without it %s", codec, shard, got, want)
		}
	}
	one := compressed{codec: "none", before: func(ctx context.Context, t *Trainer) error {
		if d, err := t.CommunicationTime(ctx, 3); err != nil || d != 0 {
			return fmt.Errorf("CommunicationTime of one replica = %v, %v; want 0", d, err)
		}
		return nil
	}}
	one.alone(t, 1)
}

// TestForwardTime checks that a training after ForwardTime has the same weights as without, and its errors.
func TestForwardTime(t *testing.T) {
	_, want := (&compressed{codec: "none", steps: 2}).alone(t, 2)
	measured := compressed{codec: "none", steps: 2}
	measured.before = func(ctx context.Context, t *Trainer) error {
		if d, err := t.ForwardTime(ctx, measured.batches, 3); err != nil || d <= 0 {
			return fmt.Errorf("ForwardTime = %v, %v; want a positive duration", d, err)
		}
		if _, err := t.ForwardTime(ctx, measured.batches, 0); err == nil {
			return errors.New("ForwardTime of no measurement gives no error")
		}
		return nil
	}
	if _, got := measured.alone(t, 2); got != want {
		t.Errorf("a training after ForwardTime has hash %s, without it %s", got, want)
	}
}
