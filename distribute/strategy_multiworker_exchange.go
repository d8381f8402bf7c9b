package distribute

import (
	"bytes"
	"context"
	"encoding/gob"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// others reports whether some members belong to other workers.
func (c *CollectiveAllReduce) others() bool { return c.cfg.GroupSize > len(c.devices) }

// exchange gathers the numbers of all members on every worker: all[rank][i]. mine has those of the local
// members, all of the same length. what describes them in errors and must be the same on all workers.
func (c *CollectiveAllReduce) exchange(ctx context.Context, what string, mine [][]int64, opts Options) ([][]int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.exchangeLocked(ctx, what, mine, opts)
}

func (c *CollectiveAllReduce) exchangeLocked(ctx context.Context, what string, mine [][]int64, opts Options) ([][]int64, error) {
	if err := c.open(ctx); err != nil {
		return nil, err
	}
	n := len(mine[0])
	sum := tensor.New(tensor.Int64, c.cfg.GroupSize*n)
	o := opts.collective()
	calls := make([]collective.Call, len(c.devices))
	for i, comm := range c.group.Local() {
		own := tensor.New(tensor.Int64, sum.Len())
		copy(tensor.Data[int64](own)[comm.Rank()*n:], mine[i])
		calls[i] = collective.Call{
			Op: collective.AllReduce, Reduce: Sum, Type: tensor.Int64, Src: own.Memory(), Dst: sum.Memory(),
			Manifest: &collective.Manifest{Name: what, Shape: sum.Shape()}, Options: &o,
		}
	}
	if err := c.group.DoAll(ctx, calls); err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(tensor.Data[int64](sum), n)), nil
}

// gatherValues gathers the values of all members on every worker, by rank. They are leaves, or nests of lists,
// tuples and dictionaries. They are transferred as bytes, so their types and shapes may differ, and strings are
// allowed.
func (c *CollectiveAllReduce) gatherValues(ctx context.Context, what string, mine []Value, opts Options) ([]Value, error) {
	texts, lengths := make([][]byte, len(mine)), make([][]int64, len(mine))
	for i, v := range mine {
		var err error
		if texts[i], err = encodeValue(v); err != nil {
			return nil, errorf(c.String(), ErrInvalid, "%s: component %d: %w", what, i, err)
		}
		lengths[i] = []int64{int64(len(texts[i]))}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	all, err := c.exchangeLocked(ctx, "lengths of "+what, lengths, opts)
	if err != nil {
		return nil, err
	}
	counts, total := make([]int, len(all)), 0
	for rank, n := range all {
		counts[rank] = int(n[0])
		total += counts[rank]
	}
	joined := tensor.New(tensor.Uint8, total)
	o := opts.collective()
	calls := make([]collective.Call, len(mine))
	for i, text := range texts {
		calls[i] = collective.Call{
			Op: collective.AllGather, Type: tensor.Uint8, Src: tensor.From(text).Memory(), Dst: joined.Memory(), Counts: counts,
			Manifest: &collective.Manifest{Name: what}, Options: &o,
		}
	}
	if err := c.group.DoAll(ctx, calls); err != nil {
		return nil, err
	}
	out, rest := make([]Value, len(counts)), tensor.Data[uint8](joined)
	for rank, n := range counts {
		if out[rank], err = decodeValue(rest[:n]); err != nil {
			return nil, errorf(c.String(), ErrMismatch, "%s: the value of replica %d: %w", what, rank, err)
		}
		rest = rest[n:]
	}
	return out, nil
}

// broadcast sends the tensor of member 0 to every worker. All workers' tensors must have the same dtype, shape
// and name.
func (c *CollectiveAllReduce) broadcast(ctx context.Context, name string, t *tensor.Tensor, opts Options) (*tensor.Tensor, error) {
	if t.DType() == tensor.String {
		mine := make([]Value, len(c.devices))
		for i := range mine {
			mine[i] = t
		}
		all, err := c.gatherValues(ctx, name, mine, opts)
		if err != nil {
			return nil, err
		}
		for rank, v := range all {
			if other, ok := v.(*tensor.Tensor); !ok || other.DType() != t.DType() || !other.SameShape(t) {
				return nil, errorf(c.String(), ErrMismatch, "%s differs between the workers: replica %d has %v, this one %v", name, rank, v, t)
			}
		}
		return all[0].(*tensor.Tensor), nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(ctx); err != nil {
		return nil, err
	}
	out, o := tensor.New(t.DType(), t.Shape()...), opts.collective()
	calls := make([]collective.Call, len(c.devices))
	for i := range calls {
		calls[i] = collective.Call{
			Op: collective.Broadcast, Type: t.DType(), Src: t.Memory(), Dst: out.Memory(),
			Manifest: &collective.Manifest{Name: name, Shape: t.Shape()}, Options: &o,
		}
	}
	return out, c.group.DoAll(ctx, calls)
}

// BatchGather implements [Gatherer]. With several workers it gathers the components of all of them, in the
// order of the replicas.
func (c *CollectiveAllReduce) BatchGather(ctx context.Context, batch []Reduction, axis int, opts Options) ([]Value, error) {
	if !c.others() {
		return gatherHere(c.String(), batch, axis)
	}
	opts = c.cfg.Options.Merge(opts)
	all := slices.Clone(batch)
	for i, b := range batch {
		if err := c.checkComponents(b.Value); err != nil {
			return nil, err
		}
		values, err := c.gatherValues(ctx, fmt.Sprintf("gather %d along axis %d", i, axis), b.Value.values, opts)
		if err != nil {
			return nil, err
		}
		all[i].Value = NewPerReplica(values...)
	}
	return gatherHere(c.String(), all, axis)
}

// checkComponents returns an error unless a value has one component for each local member.
func (c *CollectiveAllReduce) checkComponents(p *PerReplica) error {
	if n := len(p.values); n != len(c.devices) {
		return errorf(c.String(), ErrInvalid, "a value has %d components on a worker with %d replicas: want one component per replica", n, len(c.devices))
	}
	return nil
}

// wireValue is the encoding of a value for other workers. Kind says which fields are used.
type wireValue struct {
	Kind    wireKind
	Type    tensor.DType // of a tensor
	Shape   []int
	Bytes   []byte
	Strings []string
	Keys    []string    // of a dictionary
	Items   []wireValue // of a nest; of IndexedSlices: values, indices, dense shape
}

type wireKind uint8

const (
	wireNil wireKind = iota
	wireTensor
	wireSlices
	wireList
	wireTuple
	wireDict
)

// encodeValue returns a value's bytes.
func encodeValue(v Value) ([]byte, error) {
	w, err := toWire(v)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = gob.NewEncoder(&b).Encode(w)
	return b.Bytes(), err
}

func toWire(v Value) (w wireValue, err error) {
	items := func(kind wireKind, list []any) (wireValue, error) {
		w := wireValue{Kind: kind}
		for _, x := range list {
			item, err := toWire(x)
			if err != nil {
				return w, err
			}
			w.Items = append(w.Items, item)
		}
		return w, nil
	}
	switch v := v.(type) {
	case nil:
		return w, nil
	case *tensor.Tensor:
		switch {
		case v == nil:
			return w, nil
		case v.DType() == tensor.String:
			return wireValue{Kind: wireTensor, Type: tensor.String, Shape: v.Shape(), Strings: v.StringData()}, nil
		case v.Memory().Kind == tensor.Device:
			return w, errorf("Gather", ErrUnsupported, "the tensor is in device memory: copy it to the host first")
		}
		return wireValue{Kind: wireTensor, Type: v.DType(), Shape: v.Shape(), Bytes: v.Memory().HostBytes()}, nil
	case *tensor.IndexedSlices:
		return items(wireSlices, []any{v.Values, v.Indices, v.DenseShape})
	case tensor.Tuple:
		return items(wireTuple, v)
	case []any:
		return items(wireList, v)
	case map[string]any:
		keys := slices.Sorted(maps.Keys(v))
		var list []any
		for _, k := range keys {
			list = append(list, v[k])
		}
		w, err = items(wireDict, list)
		w.Keys = keys
		return w, err
	}
	return w, fmt.Errorf("cannot send a %T to other workers: want tensors, IndexedSlices, or []any, tensor.Tuple or map[string]any of them",
		v)
}

// decodeValue returns the value that encodeValue wrote.
func decodeValue(text []byte) (Value, error) {
	var w wireValue
	if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&w); err != nil {
		return nil, err
	}
	return w.value(wireDepthMax)
}

// Bounds of decoded values: the depth of nests, and the dimensions of tensors.
const (
	wireDepthMax = 64
	wireDimsMax  = 64
)

func (w *wireValue) value(depth int) (Value, error) {
	if depth == 0 {
		return nil, fmt.Errorf("nests of more than %d levels", wireDepthMax)
	}
	items := make([]any, len(w.Items))
	for i := range w.Items {
		var err error
		if items[i], err = w.Items[i].value(depth - 1); err != nil {
			return nil, err
		}
	}
	switch w.Kind {
	case wireNil:
		return nil, nil
	case wireTensor:
		return w.tensor()
	case wireSlices:
		return slicesOf(items)
	case wireList:
		return items, nil
	case wireTuple:
		return tensor.Tuple(items), nil
	case wireDict:
		if len(w.Keys) != len(items) {
			return nil, fmt.Errorf("a dictionary of %d keys and %d values", len(w.Keys), len(items))
		}
		out := map[string]any{}
		for i, k := range w.Keys {
			out[k] = items[i]
		}
		return out, nil
	}
	return nil, fmt.Errorf("a value of kind %d", w.Kind)
}

func (w *wireValue) tensor() (Value, error) {
	n := 1
	for _, d := range w.Shape {
		if d < 0 || d > 0 && n > math.MaxInt/16/d || len(w.Shape) > wireDimsMax {
			return nil, fmt.Errorf("a tensor of shape %v", w.Shape)
		}
		n *= d
	}
	switch {
	case w.Type == tensor.String && len(w.Strings) == n:
		return tensor.Strings(w.Strings, slices.Clone(w.Shape)...), nil
	case w.Type == tensor.String || w.Type == tensor.Invalid || w.Type > tensor.String || len(w.Bytes) != n*w.Type.Bytes():
		return nil, fmt.Errorf("a tensor of dtype %v and shape %v in %d bytes and %d strings", w.Type, w.Shape, len(w.Bytes), len(w.Strings))
	}
	t := tensor.New(w.Type, w.Shape...)
	if n > 0 {
		copy(t.Memory().HostBytes(), w.Bytes)
	}
	return t, nil
}

// slicesOf puts IndexedSlices together.
func slicesOf(parts []any) (Value, error) {
	s := &tensor.IndexedSlices{}
	if len(parts) != 3 {
		return nil, fmt.Errorf("IndexedSlices of %d parts", len(parts))
	}
	for i, to := range []**tensor.Tensor{&s.Values, &s.Indices, &s.DenseShape} {
		if t, ok := parts[i].(*tensor.Tensor); ok {
			*to = t
		}
	}
	return s, checkSlices(s)
}
