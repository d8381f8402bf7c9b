package collective

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// TestFailureCrosses checks that other processes receive a rank's failure as it was.
func TestFailureCrosses(t *testing.T) {
	for _, kind := range failureKinds[1:] {
		e := &Error{
			Kind: kind, Comm: "world/1.0", Rank: 3, Op: AllGather, Seq: 1 << 40, Name: "w", Peers: []int{1, 7},
			Err: errors.New("it broke"), Who: "worker 3",
		}
		got, ok := decodeFailure(encodeFailure(e, "world", 2))
		if kind == ErrClosed {
			if !ok || got.Kind != ErrPeerLost || !reflect.DeepEqual(got.Peers, []int{3}) {
				t.Errorf("a rank that closed was decoded as %v, %v, want it lost", got, ok)
			}
			continue
		}
		if !ok || got.Error() != e.Error() || !reflect.DeepEqual(got.Peers, e.Peers) || !errors.Is(got, kind) {
			t.Errorf("%v\nwas decoded as\n%v, %v", e, got, ok)
		}
	}
	got, ok := decodeFailure(encodeFailure(errors.New("anything"), "world", 2))
	if !ok || got.Kind != ErrAborted || got.Rank != 2 || got.Err.Error() != "anything" {
		t.Errorf("an error of another type was decoded as %v, %v", got, ok)
	}
	if got, ok := decodeFailure(encodeFailure(&Error{Kind: errors.New("unknown")}, "world", 2)); ok {
		t.Errorf("an unknown kind was decoded as %v", got)
	}
}

// TestSignatures checks that a call has the header, the text and the record that it would have as the first call of its
// rank, whatever calls preceded it, and however the caller has changed its Manifest.
func TestSignatures(t *testing.T) {
	g, err := Open(mem.New(2), Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	front := g.Local()[0].(*communicator)
	m := front.backend.(*planBackend)
	random := rand.New(rand.NewPCG(3, 4))
	manifests := []*Manifest{
		nil,
		{},
		{Name: "w"},
		{Name: "b"},
		{Name: "w", Shape: []int{6}},
		{Name: "w", Shape: []int{2, 3}},
		{Shape: []int{3, 2}},
		{Name: "b", Shape: []int{12}},
	}
	var before []*Call
	repeated := 0
	for turn := range uint64(5000) {
		c := randomCall(random, manifests)
		if n := len(before); n > 7 && random.IntN(4) > 0 { // usually the call made seven calls ago
			c = before[n-7]
		}
		before = append(before, c)
		if man := c.Manifest; man != nil && man.Shape != nil && random.IntN(16) == 0 {
			// The caller changes its Manifest between two calls.
			man.Shape[0], man.Shape[len(man.Shape)-1] = man.Shape[len(man.Shape)-1], man.Shape[0]
		}
		var o Options
		m.team.cfg.options(&o, c)
		count, err := c.check(m.rank, m.team.size, &o)
		if err != nil {
			continue // a shape of another count
		}
		at, was := ticket{turn: turn, seq: random.Uint64()}, m.signer.last
		r := &Running{Call: c, Count: count, Options: o, ticket: at}
		if err := m.prepare(r); err != nil {
			t.Fatal(err)
		}
		p := m.signer.last.key.plan
		if was.next == m.signer.last {
			repeated++
		}
		must := fingerprint.Params{
			Epoch: m.team.cfg.Epoch, Comm: m.team.id, Op: c.Op, Reduce: c.Reduce, Type: c.Type, Count: count,
			Counts: c.Counts, Peer: c.Peer, Named: c.Manifest != nil, Name: c.name(), Order: o.Order,
			Accumulate: uint8(o.Accumulate),
		}
		if c.Manifest != nil {
			must.Shape = c.Manifest.Shape
		}
		if p != nil {
			must.Algorithm, must.AlgorithmHash = p.row.Name, p.hash
		}
		want := fingerprint.New(&must)
		header := want.Header
		header.Seq = at.seq
		got := m.calls.call()
		if got.Header != header || m.call.Slot.Header != header || m.call.Slot.Sum != header.Sum() {
			t.Fatalf("%+v has the header %+v, and sends %+v, sum %#x: want %+v, %#x", c, got.Header, m.call.Slot.Header,
				m.call.Slot.Sum, header, header.Sum())
		}
		if !slices.Equal(got.Shape, want.Shape) || got.String() != want.String() || got.Algorithm != want.Algorithm {
			t.Fatalf("%+v is called %+v, want %+v", c, got, want)
		}
		record := front.log.calls[turn%keptCalls].record(front.log.began)
		if record.Op != c.Op.String() || record.Name != c.name() || record.Count != count ||
			record.Peer != want.Peer || record.DType != c.Type.String() || record.Algorithm != want.Algorithm {
			t.Fatalf("the record of %v is %+v", &want, record)
		}
	}
	if repeated < 2000 {
		t.Errorf("the signatures of %d calls were reused from earlier calls", repeated)
	}
}

// randomCall returns a call of rank 0 of 2. Its names are more than the signatures that a member remembers.
func randomCall(random *rand.Rand, manifests []*Manifest) *Call {
	memory := tensor.New(tensor.Float32, 6+6*random.IntN(2)).Memory()
	c := &Call{
		Op:   []Op{AllReduce, Broadcast, AllGather, Send, Recv}[random.IntN(5)],
		Type: []DType{tensor.Float32, tensor.Int32}[random.IntN(2)],
		Src:  memory, Dst: memory, Peer: 1, Manifest: manifests[random.IntN(len(manifests))],
	}
	switch {
	case c.Op == AllReduce:
		c.Reduce = []ReduceOp{Sum, Max}[random.IntN(2)]
	case c.Op == AllGather:
		c.Src = memory.Slice(0, memory.Bytes/2)
		if n := memory.Bytes / 8; random.IntN(2) == 0 {
			c.Counts = []int{n, n}
		}
	}
	if random.IntN(4) == 0 {
		c.Manifest = &Manifest{Name: fmt.Sprintf("layers/%d/kernel", random.IntN(2*signaturesMax))}
	}
	return c
}

func TestParsePreference(t *testing.T) {
	for text, want := range map[string]preference{
		"":       {},
		"direct": {all: "direct"},
		"all_reduce:direct, barrier:recursive_doubling": {of: [Recv + 1]string{
			AllReduce: "direct", Barrier: "recursive_doubling",
		}},
		"eager,broadcast:direct": {all: "eager", of: [Recv + 1]string{Broadcast: "direct"}},
	} {
		if got, err := parsePreference(text); err != nil || got != want {
			t.Errorf("%q: got %+v, %v, want %+v", text, got, err, want)
		}
	}
	for text, says := range map[string]string{
		"magic":            `no algorithm "magic"`,
		"all_reduce:magic": `no algorithm "magic"`,
		"sum:direct":       `"sum" is not a collective operation`,
		"send:direct":      `"send" is not a collective operation`,
		"direct,":          `no algorithm ""`,
	} {
		if _, err := parsePreference(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
	t.Setenv("LOCKSTEP_ALGORITHM", "all_reduce:nothing")
	if _, err := (Config{}).filled(); err == nil || !strings.Contains(err.Error(), "LOCKSTEP_ALGORITHM: no algorithm") {
		t.Errorf("the environment's mistake: %v", err)
	}
	t.Setenv("LOCKSTEP_ALGORITHM", plan.Algorithms[0].Name)
	if c, err := (Config{}).filled(); err != nil || c.Algorithm != plan.Algorithms[0].Name {
		t.Errorf("the environment's choice: %q, %v", c.Algorithm, err)
	}
	if c, err := (Config{Algorithm: "recursive_doubling"}).filled(); err != nil || c.Algorithm != "recursive_doubling" {
		t.Errorf("the program's choice: %q, %v", c.Algorithm, err)
	}
}
