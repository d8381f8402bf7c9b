package fault

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/transport"
)

// TestFailure checks that a failure is decoded as it was encoded, that its length is bounded, and that a
// malformed one is rejected.
func TestFailure(t *testing.T) {
	f := Failure{
		Kind: KindTimeout, Comm: "world/1.0", Rank: 3, Op: plan.AllGather, Seq: 1 << 40, Name: "w", Peers: []int{1, 7},
		Cause: "it broke", Who: "worker 3",
	}
	if got, ok := DecodeFailure(f.Encode()); !ok || !reflect.DeepEqual(got, f) {
		t.Errorf("%+v was decoded as %+v, %v", f, got, ok)
	}
	text := strings.Repeat("ä", 5000)
	long := Failure{Kind: KindAborted, Rank: -1, Comm: text, Name: text, Cause: text, Who: text, Peers: make([]int, 1000)}
	b := long.Encode()
	got, ok := DecodeFailure(b)
	if len(b) > transport.ReasonMax || !ok || !strings.HasSuffix(got.Cause, "ä…") || len(got.Peers) != peersMax {
		t.Errorf("a long text became %d bytes, %v %v", len(b), ok, got)
	}
	b = f.Encode()
	for name, b := range map[string][]byte{
		"nothing":      nil,
		"version":      append([]byte{9}, b[1:]...),
		"no kind":      append([]byte{version, 0}, b[2:]...),
		"unknown kind": append([]byte{version, 99}, b[2:]...),
		"unknown op":   append([]byte{version, 1, 99}, b[3:]...),
		"too short":    b[:20],
		"too long":     append(slices.Clone(b), 0),
	} {
		if got, ok := DecodeFailure(b); ok {
			t.Errorf("%s was decoded as %+v", name, got)
		}
	}
}

func FuzzDecodeFailure(f *testing.F) {
	f.Add((&Failure{Kind: KindMismatch, Rank: 1, Op: plan.Reduce, Peers: []int{3}, Cause: "why"}).Encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, ok := DecodeFailure(b)
		if !ok {
			return
		}
		again, ok := DecodeFailure(e.Encode())
		bounded := len(e.Peers) <= peersMax && len(e.Comm) <= nameMax && len(e.Name) <= nameMax &&
			len(e.Cause) <= causeMax && len(e.Who) <= whoMax
		if !ok || bounded && !reflect.DeepEqual(again, e) {
			t.Errorf("%+v became %+v, %v", e, again, ok)
		}
	})
}

func FuzzDecodeState(f *testing.F) {
	call := fingerprint.Call{
		Header: transport.Header{Op: uint8(plan.AllReduce), Seq: 7}, Name: "w", Shape: []int{2, 3}, Algorithm: "direct",
	}
	f.Add((&State{Call: call, Activity: Waiting, Entered: 8, Waits: []int{2, 5}}).Encode())
	f.Add((&State{Call: call, Activity: Busy, Entered: 8}).Encode())
	f.Add((&State{}).Encode())
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, ok := DecodeState(b)
		if !ok {
			return
		}
		_ = s.Call.String()
		again, ok := DecodeState(s.Encode())
		if !ok || again.Call.Header != s.Call.Header || again.Activity != s.Activity || again.Entered != s.Entered ||
			!slices.Equal(again.Waits, s.Waits[:min(len(s.Waits), peersMax)]) {
			t.Errorf("%+v became %+v, %v", s, again, ok)
		}
	})
}
