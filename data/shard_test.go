package data

import (
	"context"
	"errors"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

func texts(t *testing.T, ds Dataset) []string {
	t.Helper()
	var out []string
	for e, err := range ds.Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, e.(*tensor.Tensor).StringData()...)
	}
	return out
}

func TestShardFiles(t *testing.T) {
	dir := t.TempDir()
	var names []string
	for _, name := range []string{"a", "b", "c"} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(name+"0\n"+name+"1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		names = append(names, file)
	}
	same := func(_ context.Context, e Element) (Element, error) { return e, nil }
	whole := Lines(names...).Map(same).Shard(0, 1).ShardHint().Batch(4).Skip(0).Take(9).Repeat(1).Prefetch(1)
	onlyOnes := func(_ context.Context, elements iter.Seq2[Element, error]) iter.Seq2[Element, error] {
		return func(yield func(Element, error) bool) {
			for e, err := range elements {
				if err == nil && !strings.HasSuffix(e.(*tensor.Tensor).StringData()[0], "1") {
					continue
				}
				if !yield(e, err) || err != nil {
					return
				}
			}
		}
	}
	if mine, err := ShardFiles(Lines(names...).Through(onlyOnes).Batch(2), 1, 2); err != nil ||
		!slices.Equal(texts(t, mine), []string{"b1"}) {
		t.Errorf("worker 1 of 2 through a function: got %v, %v, want b1", mine, err)
	}
	if rows, _, known := BatchSize(Lines(names...).Batch(3).Through(onlyOnes)); known {
		t.Errorf("BatchSize through a function: got %d, want unknown", rows)
	}
	if got := Files(whole); !slices.Equal(got, names) {
		t.Errorf("Files: got %q, want %q", got, names)
	}
	for index, want := range [][]string{{"a0", "a1", "c0", "c1"}, {"b0", "b1"}} {
		mine, err := ShardFiles(whole, index, 2)
		if err != nil {
			t.Fatal(err)
		}
		if got := texts(t, mine); !slices.Equal(got, want) {
			t.Errorf("worker %d of 2: got %q, want %q", index, got, want)
		}
	}
	if _, err := ShardFiles(whole, 0, 4); err == nil || !strings.Contains(err.Error(), "only has 3 file(s)") {
		t.Errorf("three files for four workers: got %v", err)
	}
	if _, err := ShardFiles(fromTensors(tensor.From([]int32{1})).Batch(1), 0, 1); !errors.Is(err, ErrNoFiles) {
		t.Errorf("no files: got %v", err)
	}
}

func TestShardHint(t *testing.T) {
	whole := fromTensors(tensor.Strings([]string{"a", "b", "c", "d", "e"}, 5)).ShardHint().Batch(2)
	if got := texts(t, whole); len(got) != 5 {
		t.Errorf("read as it is: got %q, want all elements", got)
	}
	if got := texts(t, ShardHinted(whole, 1, 2)); !slices.Equal(got, []string{"b", "d"}) {
		t.Errorf("worker 1 of 2: got %q, want b and d", got)
	}
	plain := fromTensors(tensor.Strings([]string{"a", "b"}, 2)).Shard(0, 2).Batch(2)
	if got := texts(t, ShardHinted(plain, 1, 2)); !slices.Equal(got, []string{"a"}) {
		t.Errorf("without a mark: got %q, want what there was", got)
	}
}

func TestBatchSize(t *testing.T) {
	source := fromTensors(tensor.From([]int32{1, 2, 3}))
	same := func(_ context.Context, e Element) (Element, error) { return e, nil }
	for name, c := range map[string]struct {
		ds          Dataset
		rows        int
		full, known bool
	}{
		"elements":            {source, 0, true, true},
		"batches":             {source.Batch(2).Prefetch(1), 2, false, true},
		"full batches":        {source.Repeat(2).BatchFull(3).Take(1), 3, true, true},
		"mapped batches":      {source.Batch(2).Map(same), 0, false, false},
		"mapped full batches": {source.BatchFull(3).Map(same), 3, true, true},
		"rows in memory": {fromTensors([]any{
			tensor.New(tensor.Float32, 5, 4),
			tensor.New(tensor.Float32, 5, 4, 2),
		}).Skip(1), 4, true, true},
		"unequal rows": {
			fromTensors([]any{tensor.New(tensor.Float32, 5, 4), tensor.New(tensor.Float32, 5, 3)}), 0, true,
			true,
		},
		"another's": {Of(FromSeq(-1, source.Iter).Take(3)), 0, false, false},
	} {
		if rows, full, known := BatchSize(c.ds); rows != c.rows || full != c.full || known != c.known {
			t.Errorf("%s: got %d, %t, %t, want %d, %t, %t", name, rows, full, known, c.rows, c.full, c.known)
		}
	}
}

// TestSharded checks that a Shard is found at any place in a pipeline.
func TestSharded(t *testing.T) {
	same := func(_ context.Context, e Element) (Element, error) { return e, nil }
	through := func(_ context.Context, seq iter.Seq2[Element, error]) iter.Seq2[Element, error] { return seq }
	rows := fromTensors(tensor.From([]int32{1, 2, 3, 4, 5, 6}))
	stream := FromSeq(-1, rows.Iter)
	dir := t.TempDir()
	files, err := ShardFiles(Lines(filepath.Join(dir, "a"), filepath.Join(dir, "b")).Batch(2), 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	kept, held := rows.Shard(1, 2).Split(0.5, 1)
	for _, c := range []struct {
		name string
		ds   Dataset
		want bool
	}{
		{"rows", rows.Shard(1, 2), true},
		{
			"rows, shuffled before and mapped after", rows.Shuffle(1).Shard(1, 2).Map(same).Take(2).Skip(1).Batch(2).Prefetch(1),
			true,
		},
		{"stream", stream.Map(same).Shard(1, 2).Batch(2).Through(through).Repeat(2).Take(1).Skip(0).ShardHint(), true},
		{"batches", rows.Batch(2).Shard(1, 2).ShuffleBuffer(1, 2), true},
		{"kept", kept.Batch(2), true},
		{"held", held, true},
		{"files", files, true},
		{"hinted", ShardHinted(rows.ShardHint().Batch(2), 1, 2), true},
		{"nothing", rows.Batch(2), false},
		{"one part", rows.Shard(0, 1).Batch(2), false},
		{"one part of a stream", stream.Shard(0, 1).Batch(2), false},
		{"a hint", rows.ShardHint().Batch(2), false},
		{"nil", Pipeline{}, false},
		{"of others", FromSeq(-1, rows.Shard(1, 2).Iter), false},
	} {
		if index, count, ok := Sharded(c.ds); ok != c.want || ok && (index != 1 || count != 2) {
			t.Errorf("%s: got Shard(%d, %d), %v", c.name, index, count, ok)
		}
	}
}

// fromTensors is FromTensors for tensors that have equally many rows. It panics at an error.
func fromTensors(e Element) Pipeline {
	p, err := FromTensors(e)
	if err != nil {
		panic(err)
	}
	return p
}
