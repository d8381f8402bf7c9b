package plan

import (
	"slices"
	"strings"
	"testing"
)

// TestFused checks that the copy of Src is removed exactly where the next exchange combines it with received data.
func TestFused(t *testing.T) {
	span := func(b Buffer, lo, hi int) Span { return Span{Buffer: b, Lo: lo, Hi: hi} }
	exchange := func(out, in Span, side Side) Step {
		return Step{Kind: Exchange, To: 1, From: 1, Out: out, In: in, Side: side}
	}
	src, work := span(Src, 0, 9), span(Work, 0, 9)
	dup := Step{Kind: Copy, In: src, Out: work, To: -1, From: -1}
	for _, test := range []struct {
		name  string
		after Step
		fused bool
		out   Span // what is sent then
	}{
		{"sends another part of the source", exchange(span(Src, 9, 12), work, Left), true, span(Src, 9, 12)},
		{"sends what it combines", exchange(work, work, Right), true, src},
		{"only receives", Step{Kind: Exchange, To: -1, From: 1, In: work, Side: Right}, true, Span{}},
		{"overwrites", exchange(work, span(Work, 9, 12), Replace), false, work},
		{"combines a part", exchange(src, span(Work, 0, 5), Left), false, src},
		{"sends a part of the copy", exchange(span(Work, 0, 5), work, Left), false, span(Work, 0, 5)},
		{"only sends", Step{Kind: Exchange, To: 1, From: -1, Out: work}, false, work},
	} {
		got := Fuse(slices.Clone([]Step{dup, test.after}))
		last := got[len(got)-1]
		if (len(got) == 1) != test.fused || last.Out != test.out || test.fused != (last.Own == src) {
			t.Errorf("%s: %v", test.name, got)
		}
	}
}

// TestTurns checks that in turns every segment of both exchanges occurs once, those of each exchange in order, and that
// a segment of the all-gather is ready exactly when the segment of the same number of the reduce-scatter is done.
func TestTurns(t *testing.T) {
	for each := 1; each < 30; each++ {
		for lead := 1; lead <= each; lead++ {
			turns := Turns{Each: each, Lead: lead}
			next, at := [2]int{}, map[int]int{} // where the reduce-scatter's segments are
			for place := range 2 * each {
				gather, segment := turns.At(place)
				kind := 0
				if gather {
					kind = 1
				} else {
					at[segment] = place
				}
				if segment != next[kind] {
					t.Fatalf("%+v: segment %d at %d, gather %v, want %d", turns, segment, place, gather, next[kind])
				}
				next[kind]++
				for done := range 2*each + 1 {
					if want := !gather || done > at[segment]; turns.Ready(place, done) != want {
						t.Fatalf("%+v: place %d is ready after %d: %v, want %v", turns, place, done, !want, want)
					}
				}
			}
			if next != [2]int{each, each} {
				t.Fatalf("%+v: %v segments", turns, next)
			}
		}
	}
}

// TestExecutedDiffers checks that both ways of execution change plans of the table, so that proving them is meaningful.
func TestExecutedDiffers(t *testing.T) {
	fused, turns := 0, 0
	for _, a := range Algorithms {
		for n := 2; n < 6; n++ {
			p := Problem{Op: AllReduce, Size: n, Count: 300*n + 77, Reduce: Mean}
			for rank := range n {
				p.Places = append(p.Places, Place{rank, rank, rank})
			}
			if a.Fits(p) != nil {
				continue
			}
			for _, way := range ways(a, p)[1:] {
				for _, steps := range way.plans {
					for i := range steps {
						if steps[i].Kind == Exchange && steps[i].Own.length() > 0 {
							fused++
						}
					}
					if len(steps) > 20 && n == 2 {
						turns++
					}
				}
			}
		}
	}
	if fused == 0 || turns == 0 {
		t.Errorf("%d fused steps, %d plans in turns", fused, turns)
	}
}

// TestWronglyExecuted checks that the checker rejects a wrong use of the in-place transfer: wrong turns, or the wrong
// part of the rank's own vector.
func TestWronglyExecuted(t *testing.T) {
	p := Problem{Op: AllReduce, Size: 2, Count: 77, Places: []Place{{}, {1, 1, 1}}}
	own := func(steps []Step) int {
		return slices.IndexFunc(steps, func(s Step) bool { return s.Own.length() > 0 })
	}
	for _, test := range []struct {
		name, want string
		spoil      func(steps []Step)
	}{
		{"right", "", func([]Step) {}},
		{"without its own part", "that was never written", func(steps []Step) { steps[own(steps)].Own = Span{} }},
		{"with a shorter part", "of another length", func(steps []Step) { steps[own(steps)].Own.Hi-- }},
		{"with a part of the others'", "combines element", func(steps []Step) {
			s := &steps[own(steps)]
			s.Own = Span{Src, s.Out.Lo, s.Out.Lo + s.In.length()}
		}},
		{"over what it combines", "is combined with nothing", func(steps []Step) { steps[own(steps)].Side = Replace }},
		{"sent on too early", "that was never written", func(steps []Step) {
			i := slices.IndexFunc(steps, func(s Step) bool { return s.Kind == Exchange && s.Side == Replace && s.To >= 0 })
			steps[0], steps[i] = steps[i], steps[0]
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			one := solve(directFrames, p)
			for rank, steps := range one.plans {
				one.plans[rank] = executed(p, steps, 5, TurnsLead)
				test.spoil(one.plans[rank])
			}
			f := newProof([]solved{one}, sharing{}, &arena{}).run()
			if test.want == "" && f != nil || test.want != "" && (f == nil || !strings.Contains(f.Error(), test.want)) {
				t.Errorf("got %v, want %q", f, test.want)
			}
		})
	}
}
