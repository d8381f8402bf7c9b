package data_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestSeek checks that the last batch of a long epoch is read at once, whatever was skipped.
func TestSeek(t *testing.T) {
	const n, rows = 10_000_000, 100
	var reads atomic.Int64
	p := data.FromFunc(n, func(_ context.Context, i int) (data.Element, error) {
		reads.Add(1)
		return tensor.Scalar(int32(i)), nil
	}).Shuffle(1).Batch(rows).Prefetch(2)
	start := time.Now()
	batches := 0
	for e, err := range data.IterFrom(data.WithEpoch(t.Context(), 3), p, n/rows-1) {
		if err != nil || e.(*tensor.Tensor).Len() != rows {
			t.Fatal(e, err)
		}
		batches++
	}
	t.Logf("the last of %d batches after %v", n/rows, time.Since(start))
	if batches != 1 || reads.Load() != rows {
		t.Errorf("%d batches and %d examples were read, want 1 and %d", batches, reads.Load(), rows)
	}
}

// TestWorkers checks that several goroutines read at the same time, in order, and how they end.
func TestWorkers(t *testing.T) {
	const n, workers = 40, 4
	for name, source := range sources(n) {
		for what, of := range map[string]func(data.Pipeline) data.Pipeline{
			"elements": func(p data.Pipeline) data.Pipeline { return p.Workers(workers) },
			"rows":     func(p data.Pipeline) data.Pipeline { return p.Workers(workers).Batch(8) },
			"batches":  func(p data.Pipeline) data.Pipeline { return p.Batch(8).Workers(workers).Prefetch(1) },
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				if name == "seq" && what == "rows" {
					of = func(p data.Pipeline) data.Pipeline { return p.Workers(workers).Batch(8).Workers(workers) }
				}
				cause := errors.New("cause")
				var inside, most, calls atomic.Int64
				mapped := func(fail int) data.Pipeline {
					return of(source.Map(func(_ context.Context, e data.Element) (data.Element, error) {
						now := inside.Add(1)
						defer inside.Add(-1)
						for seen := most.Load(); now > seen && !most.CompareAndSwap(seen, now); seen = most.Load() {
						}
						calls.Add(1)
						switch id := int(tensor.Data[int32](e.(example).ID)[0]); {
						case id == fail && fail == 21:
							panic(cause)
						case id >= fail:
							return nil, cause
						}
						time.Sleep(time.Millisecond)
						return e, nil
					}))
				}
				got := flatIDs(t, mapped(n), 0)
				for i, id := range got {
					if id != i {
						t.Fatalf("got %v", got)
					}
				}
				if len(got) != n || most.Load() < 2 || most.Load() > workers {
					t.Errorf("%d elements, %d calls at a time: want %d, 2 to %d", len(got), most.Load(), n, workers)
				}
				for _, fail := range []int{20, 21} {
					read, err := firstError(t.Context(), mapped(fail))
					if want := map[bool]int{true: fail, false: fail / 8}[what == "elements"]; read != want ||
						!errors.Is(err, cause) {
						t.Errorf("an error at %d: %d elements were read, then %v", fail, read, err)
					}
					if panics := err != nil && strings.Contains(err.Error(), "panic"); panics != (fail == 21) {
						t.Errorf("an error at %d: %v", fail, err)
					}
				}
				calls.Store(0)
				for range mapped(n).Iter(t.Context()) {
					break
				}
				if inside.Load() != 0 || calls.Load() > 4*workers+16 {
					t.Errorf("after a break %d are being read, and %d were read ahead", inside.Load(), calls.Load())
				}
			})
		}
	}
}

// TestFingerprint checks what changes the fingerprint of a pipeline.
func TestFingerprint(t *testing.T) {
	of := func(x ...float32) data.Pipeline { return fromTensors(tensor.From(x)) }
	p := of(1, 2, 3, 4)
	kept, _ := p.Split(0.5, 1)
	other, _ := p.Split(0.5, 3)
	seen := map[uint64]string{}
	for name, p := range map[string]data.Dataset{
		"plain": p, "value": of(1, 2, 3, 5), "shuffled": p.Shuffle(1), "other seed": p.Shuffle(2), "batches": p.Batch(2),
		"other batches": p.Batch(3), "full": p.BatchFull(2), "skipped": p.Skip(1), "taken": p.Take(1), "kept": kept,
		"other kept": other, "repeated": p.Repeat(2), "skipped batches": p.Batch(2).Skip(1),
		"random": p.MapRandom(5, nil), "other random": p.MapRandom(6, nil), "random batches": p.Batch(2).MapRandom(5, nil),
		"strings": fromTensors(tensor.Strings([]string{"a", "b"})),
		"other":   fromTensors(tensor.Strings([]string{"a", "c"})),
	} {
		f := data.Fingerprint(p)
		if again := data.Fingerprint(data.Of(p).Prefetch(2)); f == 0 || f != again {
			t.Errorf("%s: %x, and prefetched %x", name, f, again)
		}
		if seen[f] != "" {
			t.Errorf("%s and %s have one fingerprint", name, seen[f])
		}
		seen[f] = name
	}
	if f := data.Fingerprint(sources(3)["seq"]); f != 0 {
		t.Errorf("a sequence has the fingerprint %x", f)
	}
}
