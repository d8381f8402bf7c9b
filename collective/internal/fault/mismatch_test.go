package fault

import (
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

func TestMismatch(t *testing.T) {
	slot := func(count uint64, name string) *transport.Slot {
		h := transport.Header{Op: uint8(plan.AllReduce), Reduce: 1, Type: uint8(tensor.Float32), Count: count}
		return &transport.Slot{Header: h, Name: name}
	}
	var p Parties
	p.Add(0, slot(3, "w"))
	if text, others := p.Mismatch(); others != nil {
		t.Errorf("one rank does not match: %s", text)
	}
	for r, count := range []uint64{3, 4, 3, 5} {
		p.Add(r+1, slot(count, "w"))
	}
	text, others := p.Mismatch()
	want := `rank 2 calls all_reduce SUM float32 [4] of "w", rank 4 calls all_reduce SUM float32 [5] of "w", ` +
		`ranks 0, 1, 3 call all_reduce SUM float32 [3] of "w": the counts differ`
	if text != want || !slices.Equal(others, []int{2, 4}) {
		t.Errorf("%v: %s\nwant %s", others, text, want)
	}
}

// TestDiffer checks that both ranks describe a difference of their calls in the same way.
func TestDiffer(t *testing.T) {
	for _, test := range []struct {
		low, high fingerprint.Call
		deadlock  bool
		want      string
	}{
		{
			collective(5), message(0), false,
			"rank 1 calls recv float32 [3] from rank 0, rank 0 calls barrier: the numbers of the calls differ: 0 and 5",
		},
		{
			send(1), send(0), true,
			"rank 1 calls send float32 [3] to rank 0, rank 0 calls send float32 [3] to rank 1: " +
				"both send to each other, and neither receives",
		},
	} {
		low, high := Part{0, &test.low}, Part{1, &test.high}
		for _, pair := range [][2]Part{{low, high}, {high, low}} {
			c := Differ(pair[0], pair[1])
			if c.Text != test.want || c.Deadlock != test.deadlock || c.Peer != pair[1].Rank {
				t.Errorf("rank %d: %+v\nwant %s", pair[0].Rank, c, test.want)
			}
		}
	}
}

func send(peer int) fingerprint.Call {
	return fingerprint.New(&fingerprint.Params{Op: plan.Send, Type: tensor.Float32, Count: 3, Peer: peer})
}

// TestReceiveDeadlock checks that two ranks that each receive from the other first wait for each other, unless
// one has begun to send what the other receives.
func TestReceiveDeadlock(t *testing.T) {
	a, b := message(1), message(0)
	c := ReceiveDeadlock(Part{0, &a}, Part{1, &b})
	want := "rank 1 calls recv float32 [3] from rank 0, rank 0 calls recv float32 [3] from rank 1: " +
		"they wait for each other"
	if c == nil || c.Text != want || !c.Deadlock || c.Peer != 1 {
		t.Errorf("%+v\nwant %s", c, want)
	}
	for name, change := range map[string]func(){
		"the peer has sent":       func() { b.Back = 1 },
		"this rank has sent":      func() { a.Back = 1 },
		"the peer sends":          func() { b.Pair = plan.Send },
		"the peer receives later": func() { b.Peer = 2 },
	} {
		a, b = message(1), message(0)
		change()
		if c := ReceiveDeadlock(Part{0, &a}, Part{1, &b}); c != nil {
			t.Errorf("%s: %s", name, c.Text)
		}
	}
}

func numbered(c fingerprint.Call) *fingerprint.Numbered {
	n := &fingerprint.Numbered{Like: &c, Seq: c.Header.Seq, Back: c.Back}
	c.Header.Seq, c.Back = 0, 0
	return n
}

// TestBlocked checks which calls of two ranks conflict when both have blocked.
func TestBlocked(t *testing.T) {
	always, never := func(int) bool { return true }, func(int) bool { return false }
	named := fingerprint.New(&fingerprint.Params{Op: plan.Barrier, Named: true, Name: "w"})
	one := func(op plan.Op, peer int) (n fingerprint.Numbers) { n.Next(op, peer); return n }
	both := func(op plan.Op, peer int) fingerprint.Numbers {
		n := one(op, peer)
		n.Next(0, 0)
		return n
	}
	for name, test := range map[string]struct {
		own, peer    fingerprint.Call
		begun, peers fingerprint.Numbers
		near         func(int) bool
		conflict     bool
		deadlock     bool
	}{
		"equal collectives":          {collective(0), collective(0), one(0, 0), one(0, 0), always, false, false},
		"other collectives":          {collective(0), named, one(0, 0), one(0, 0), never, true, false},
		"a later collective":         {collective(0), collective(1), one(0, 0), one(0, 0), always, false, false},
		"both send":                  {send(1), send(0), one(plan.Send, 1), one(plan.Send, 0), never, true, true},
		"the halves of a message":    {send(1), message(0), one(plan.Send, 1), one(plan.Recv, 0), never, false, false},
		"another peer":               {send(2), send(0), one(plan.Send, 2), one(plan.Send, 0), never, false, false},
		"a message and a collective": {send(1), collective(0), one(plan.Send, 1), one(0, 0), always, true, true},
		"a collective and a message": {collective(0), message(0), one(0, 0), one(plan.Recv, 0), always, true, true},
		"not of one domain":          {send(1), collective(0), one(plan.Send, 1), one(0, 0), never, false, false},
		"the peer has received":      {send(1), collective(0), one(plan.Send, 1), both(plan.Recv, 0), always, false, false},
		"this rank was in it":        {send(1), collective(0), both(plan.Send, 1), one(0, 0), always, false, false},
	} {
		own, peer := NewBlocked(0, test.near), NewBlocked(1, test.near)
		peer.Block(numbered(test.peer), &test.peers)
		if c := peer.Conflict(&own); c != nil {
			t.Errorf("%s: one blocked rank conflicts: %+v", name, c)
		}
		own.Block(numbered(test.own), &test.begun)
		c := own.Conflict(&peer)
		if (c != nil) != test.conflict || c != nil && (c.Deadlock != test.deadlock || c.Peer != 1) {
			t.Errorf("%s: %+v, want a conflict %v, a deadlock %v", name, c, test.conflict, test.deadlock)
		}
	}
}
