package collective

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/transport"
)

func TestErrorText(t *testing.T) {
	cause := errors.New("it broke")
	for _, test := range []struct {
		err  *Error
		want string
	}{
		{&Error{Kind: ErrClosed, Comm: "world", Rank: 1}, `collective: communicator "world", rank 1: communicator closed`},
		{&Error{Kind: ErrAborted, Comm: "world", Rank: -1, Err: cause}, `collective: communicator "world": aborted: it broke`},
		{
			&Error{Kind: ErrTimeout, Comm: "world", Rank: 2, Op: AllReduce, Seq: 7, Name: "w", Err: cause},
			`collective: communicator "world", rank 2, call 7, all_reduce of "w": deadline exceeded: it broke`,
		},
	} {
		if got := test.err.Error(); got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
		if !errors.Is(test.err, test.err.Kind) || test.err.Err != nil && !errors.Is(test.err, cause) {
			t.Errorf("%v does not match its kind and cause", test.err)
		}
		if timeout := test.err.Kind == ErrTimeout; errors.Is(test.err, context.DeadlineExceeded) != timeout || test.err.Timeout() != timeout {
			t.Errorf("%v is a deadline: want %v", test.err, timeout)
		}
	}
}

// TestDiffer: whatever field of two headers differs, the sentence names it, with and without the text behind the hashes.
func TestDiffer(t *testing.T) {
	known := &label{name: "w", shape: []int{3}, algo: "direct"}
	for name, test := range map[string]struct {
		change func(*transport.Header)
		theirs *label
		want   string
	}{
		"epoch":             {func(h *transport.Header) { h.Epoch++ }, known, "the epochs differ: 1 and 0"},
		"communicator":      {func(h *transport.Header) { h.Comm = 0xab }, known, "the communicators differ: 0xab and 0x0"},
		"seq":               {func(h *transport.Header) { h.Seq = 9 }, known, "the numbers of the calls differ: 9 and 0"},
		"op":                {func(h *transport.Header) { h.Op = 2 }, known, "the operations differ"},
		"reduce":            {func(h *transport.Header) { h.Reduce++ }, known, "the reductions differ"},
		"dtype":             {func(h *transport.Header) { h.Type++ }, known, "the dtypes differ"},
		"root":              {func(h *transport.Header) { h.Root++ }, known, "the roots differ"},
		"count":             {func(h *transport.Header) { h.Count++ }, known, "the counts differ"},
		"name":              {func(h *transport.Header) { h.Names++ }, &label{name: "b", shape: []int{3}}, "the names differ"},
		"shape":             {func(h *transport.Header) { h.Names++ }, &label{name: "w", shape: []int{4}}, "the shapes differ"},
		"names, not known":  {func(h *transport.Header) { h.Names++ }, nil, "the names, shapes or counts by rank differ"},
		"count, not known":  {func(h *transport.Header) { h.Names++; h.Count++ }, nil, "the counts differ"},
		"order":             {func(h *transport.Header) { h.Order = uint8(Any) << 4 }, known, "the orders of reduction differ: any and canonical"},
		"accumulate":        {func(h *transport.Header) { h.Order |= uint8(AccumulateFloat32) }, known, "the accumulation types differ: float32 and the dtype"},
		"plan":              {func(h *transport.Header) { h.Plan++ }, &label{algo: "recursive_doubling"}, `the algorithms differ: "recursive_doubling" and "direct"`},
		"plan, not known":   {func(h *transport.Header) { h.Plan++ }, nil, "the algorithms differ"},
		"frame out of turn": {func(h *transport.Header) { h.Frame = 5 }, known, "the frames differ: got number 5, want 0"},
	} {
		own := transport.Header{Order: uint8(Canonical) << 4}
		other := own
		test.change(&other)
		if got := differ(&own, &other, known, test.theirs); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

func TestParseReduceOp(t *testing.T) {
	for r := Sum; r <= Prod; r++ {
		if got, err := ParseReduceOp(strings.ToLower(r.String())); err != nil || got != r {
			t.Errorf("%v became %v, %v", r, got, err)
		}
	}
	if _, err := ParseReduceOp("MEDIAN"); err == nil || !strings.Contains(err.Error(), `"MEDIAN" is not a reduction`) {
		t.Errorf("MEDIAN: %v", err)
	}
}

// TestNamesHash: the hash is the same in every build, and tells apart what differs.
func TestNamesHash(t *testing.T) {
	seen := map[uint64]*Manifest{}
	for _, m := range []*Manifest{
		nil,
		{},
		{Name: "w"},
		{Name: "w\x00"},
		{Name: "longer than eight bytes"},
		{Name: "longer than eight bytez"},
		{Name: "w", Shape: []int{}},
		{Name: "w", Shape: []int{2, 3}},
		{Name: "w", Shape: []int{3, 2}},
		{Name: "w", Shape: []int{1, 2, 3}},
	} {
		h := namesHash(&Call{Manifest: m}, 6, fieldShape)
		if other, ok := seen[h]; ok {
			t.Errorf("%+v and %+v have the hash %#x", m, other, h)
		}
		seen[h] = m
	}
	if a, b := namesHash(&Call{Manifest: &Manifest{Name: "w"}}, 6, fieldShape), namesHash(&Call{Manifest: &Manifest{Name: "w", Shape: []int{6}}}, 6, fieldShape); a != b {
		t.Errorf("no shape hashes to %#x, the vector that it means to %#x", a, b)
	}
	const want = 0x56a201b193c8d318
	if got := namesHash(&Call{Manifest: &Manifest{Name: "layers/0/kernel", Shape: []int{784, 512}}}, 784*512, fieldShape); got != want {
		t.Errorf("the hash that crosses the wire changed: %#x, was %#x", got, uint64(want))
	}
}

func TestConfig(t *testing.T) {
	got, err := Config{}.filled()
	if err != nil || got.Name != "world" || got.Timeout != defaultTimeout || got.Stall != defaultStall || got.Order != Canonical ||
		got.Accumulate != AccumulateDType || got.Logger == nil {
		t.Errorf("the zero Config became %+v, %v", got, err)
	}
	for says, c := range map[string]Config{
		`no algorithm "magic"`:        {Algorithm: "magic"},
		"unknown order 7":             {Order: 7},
		"unknown accumulation type 7": {Accumulate: 7},
		`configuration of "train"`:    {Name: "train", Order: 7},
	} {
		if _, err := Open(nil, c); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want %q", c, err, says)
		}
	}
	if _, err := Open(nil, Config{}); err == nil {
		t.Error("Open without endpoints: no error")
	}
}
