package fingerprint

import (
	"testing"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// TestDiffer checks that the text names the field in which two headers differ, with and without the names and
// shapes behind the hashes.
func TestDiffer(t *testing.T) {
	known := Call{Name: "w", Shape: []int{3}, Algorithm: "direct"}
	unknown := Call{HeaderOnly: true}
	for name, test := range map[string]struct {
		change func(*transport.Header)
		theirs Call
		want   string
	}{
		"epoch":            {func(h *transport.Header) { h.Epoch++ }, known, "the epochs differ: 1 and 0"},
		"communicator":     {func(h *transport.Header) { h.Comm = 0xab }, known, "the communicators differ: 0xab and 0x0"},
		"seq":              {func(h *transport.Header) { h.Seq = 9 }, known, "the numbers of the calls differ: 9 and 0"},
		"op":               {func(h *transport.Header) { h.Op = 2 }, known, "the operations differ"},
		"reduce":           {func(h *transport.Header) { h.Reduce++ }, known, "the reductions differ"},
		"dtype":            {func(h *transport.Header) { h.Type++ }, known, "the dtypes differ"},
		"root":             {func(h *transport.Header) { h.Root++ }, known, "the roots differ"},
		"count":            {func(h *transport.Header) { h.Count++ }, known, "the counts differ"},
		"name":             {func(h *transport.Header) { h.Names++ }, Call{Name: "b", Shape: []int{3}}, "the names differ"},
		"shape":            {func(h *transport.Header) { h.Names++ }, Call{Name: "w", Shape: []int{4}}, "the shapes differ"},
		"names, not known": {func(h *transport.Header) { h.Names++ }, unknown, "the names, shapes or counts by rank differ"},
		"count, not known": {func(h *transport.Header) { h.Names++; h.Count++ }, unknown, "the counts differ"},
		"order": {
			func(h *transport.Header) { h.Order = uint8(plan.Any) << 4 }, known,
			"the orders of reduction differ: any and canonical",
		},
		"accumulate": {
			func(h *transport.Header) { h.Order |= 2 }, known,
			"the accumulation types differ: float32 and the dtype",
		},
		"plan": {
			func(h *transport.Header) { h.Plan++ },
			Call{Algorithm: "recursive_doubling"},
			`the algorithms differ: "recursive_doubling" and "direct"`,
		},
		"plan, not known":   {func(h *transport.Header) { h.Plan++ }, unknown, "the algorithms differ"},
		"frame out of turn": {func(h *transport.Header) { h.Frame = 5 }, known, "the frames differ: got number 5, want 0"},
	} {
		own, other := known, test.theirs
		own.Header = transport.Header{Order: uint8(plan.Canonical) << 4}
		other.Header = own.Header
		test.change(&other.Header)
		if got := Differ(&own, &other); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

// TestNamesHash checks that the hash is the same in every build, and distinguishes what differs.
func TestNamesHash(t *testing.T) {
	names := func(p Params) uint64 {
		p.Op, p.Count = plan.AllReduce, 6
		return New(&p).Header.Names
	}
	seen := map[uint64]Params{}
	for _, p := range []Params{
		{},
		{Named: true},
		{Named: true, Name: "w"},
		{Named: true, Name: "w\x00"},
		{Named: true, Name: "longer than eight bytes"},
		{Named: true, Name: "longer than eight bytez"},
		{Named: true, Name: "w", Shape: []int{}},
		{Named: true, Name: "w", Shape: []int{2, 3}},
		{Named: true, Name: "w", Shape: []int{3, 2}},
		{Named: true, Name: "w", Shape: []int{1, 2, 3}},
	} {
		h := names(p)
		if other, ok := seen[h]; ok {
			t.Errorf("%+v and %+v have the hash %#x", p, other, h)
		}
		seen[h] = p
	}
	vector, shaped := Params{Named: true, Name: "w"}, Params{Named: true, Name: "w", Shape: []int{6}}
	if a, b := names(vector), names(shaped); a != b {
		t.Errorf("no shape hashes to %#x, the vector that it means to %#x", a, b)
	}
	const want = 0x56a201b193c8d318
	if got := names(Params{Named: true, Name: "layers/0/kernel", Shape: []int{784, 512}}); got != want {
		t.Errorf("the hash that other processes receive changed: %#x, was %#x", got, uint64(want))
	}
}

// TestAgreed checks for every operation and every part of a call that the headers of two ranks are equal
// exactly if the table says that the part need not agree, or has no meaning.
func TestAgreed(t *testing.T) {
	changes := map[Fields]func(p *Params){
		Reduce:    func(p *Params) { p.Reduce = plan.Max },
		Type:      func(p *Params) { p.Type = tensor.Int32 },
		Root:      func(p *Params) { p.Root = 1 },
		Count:     func(p *Params) { p.Count = 12 },
		Counts:    func(p *Params) { p.Counts = []int{2, 4} },
		Name:      func(p *Params) { p.Name = "b" },
		Shape:     func(p *Params) { p.Shape = []int{3, 2} },
		Order:     func(p *Params) { p.Accumulate = 2 },
		Algorithm: func(p *Params) { p.AlgorithmHash = 9 },
	}
	made := func(op plan.Op) Params {
		return Params{
			Comm: 5, Op: op, Type: tensor.Float32, Count: 6, Counts: []int{3, 3}, Named: true, Name: "w",
			Shape: []int{2, 3}, Order: plan.Canonical, Accumulate: 1, AlgorithmHash: 8,
		}
	}
	for op := plan.AllReduce; op <= plan.Recv; op++ {
		if Agreed(op) == 0 {
			t.Errorf("%v has no row", op)
		}
		for f, change := range changes {
			own, other := made(op), made(op)
			change(&other)
			if differs := New(&own).Header != New(&other).Header; differs != Agreed(op).Has(f) {
				t.Errorf("%v: field %b changes the header: %v, want %v", op, f, differs, !differs)
			}
		}
	}
	send, receive := made(plan.Send), made(plan.Recv)
	send.Peer, receive.Peer = 1, 0
	a, b := New(&send), New(&receive)
	if a.Header != b.Header || a.Pair == b.Pair {
		t.Errorf("the two ends of a message are %+v and %+v", a, b)
	}
	if Agreed(0) != 0 || Agreed(255) != 0 {
		t.Error("an unknown operation has fields that must agree")
	}
}

func TestString(t *testing.T) {
	for want, p := range map[string]Params{
		`all_reduce MEAN float32 [2 3] of "w"`: {
			Op: plan.AllReduce, Reduce: plan.Mean, Type: tensor.Float32, Count: 6, Named: true, Name: "w", Shape: []int{2, 3},
		},
		`all_reduce SUM float32 [6]`:      {Op: plan.AllReduce, Type: tensor.Float32, Count: 6},
		`broadcast int32 [6] from rank 3`: {Op: plan.Broadcast, Type: tensor.Int32, Count: 6, Root: 3},
		`reduce MAX float32 [6] to rank 1`: {
			Op: plan.Reduce, Reduce: plan.Max, Type: tensor.Float32, Count: 6, Root: 1,
		},
		`all_gather float32 [6] in parts of [2 4] of "p"`: {
			Op: plan.AllGather, Type: tensor.Float32, Count: 6, Counts: []int{2, 4}, Named: true, Name: "p",
		},
		`barrier of "epoch"`:           {Op: plan.Barrier, Named: true, Name: "epoch"},
		`send float32 [3] to rank 4`:   {Op: plan.Send, Type: tensor.Float32, Count: 3, Peer: 4},
		`recv float32 [3] from rank 4`: {Op: plan.Recv, Type: tensor.Float32, Count: 3, Peer: 4},
	} {
		if c := New(&p); c.String() != want {
			t.Errorf("got %q, want %q", c.String(), want)
		}
	}
	c := New(&Params{Op: plan.Recv, Type: tensor.Float32, Count: 3, Peer: 4})
	if c = (Call{Header: c.Header, HeaderOnly: true}); c.String() != "send float32 [3]" {
		t.Errorf("a header alone is %q", c.String())
	}
}
