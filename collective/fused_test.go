package collective

import (
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

// TestFused: the copy of what is given goes away where the next exchange combines it with what comes, and nowhere else.
func TestFused(t *testing.T) {
	span := func(b plan.Buffer, lo, hi int) plan.Span { return plan.Span{Buffer: b, Lo: lo, Hi: hi} }
	exchange := func(out, in plan.Span, side plan.Side) plan.Step {
		return plan.Step{Kind: plan.Exchange, To: 1, From: 1, Out: out, In: in, Side: side}
	}
	src, work := span(plan.Src, 0, 9), span(plan.Work, 0, 9)
	dup := plan.Step{Kind: plan.Copy, In: src, Out: work, To: -1, From: -1}
	for _, test := range []struct {
		name  string
		after plan.Step
		fused bool
		out   plan.Span // what is sent then
	}{
		{"sends another part of the source", exchange(span(plan.Src, 9, 12), work, plan.Left), true, span(plan.Src, 9, 12)},
		{"sends what it combines", exchange(work, work, plan.Right), true, src},
		{"only receives", plan.Step{Kind: plan.Exchange, To: -1, From: 1, In: work, Side: plan.Right}, true, plan.Span{}},
		{"overwrites", exchange(work, span(plan.Work, 9, 12), plan.Replace), false, work},
		{"combines a part", exchange(src, span(plan.Work, 0, 5), plan.Left), false, src},
		{"sends a part of the copy", exchange(span(plan.Work, 0, 5), work, plan.Left), false, span(plan.Work, 0, 5)},
		{"only sends", plan.Step{Kind: plan.Exchange, To: 1, From: -1, Out: work}, false, work},
	} {
		got := fused(slices.Clone([]plan.Step{dup, test.after}))
		last := got[len(got)-1]
		if (len(got) == 1) != test.fused || last.Out != test.out || test.fused != (last.Own == src) {
			t.Errorf("%s: %v", test.name, got)
		}
	}
}
