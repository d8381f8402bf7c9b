package plan

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
)

// TestCheckRefuses breaks correct plans in one place each, and checks that the checker names the place and the reason.
func TestCheckRefuses(t *testing.T) {
	reduce := Problem{Op: AllReduce, Size: 4, Count: 256}
	five := Problem{Op: AllReduce, Size: 5, Count: 10}
	broadcast := Problem{Op: Broadcast, Size: 4, Count: 10, Root: 1}
	for _, c := range []struct {
		name    string
		of      Algorithm
		problem Problem
		broken  map[int]func(plan []Step) []Step // by rank; -1: every rank
		rank    int
		index   int
		reason  string
	}{
		{
			"dropped send", recursiveDoubling, broadcast,
			on(1, func(plan []Step) []Step { return slices.Delete(plan, 0, 1) }),
			3, 0, "waits forever to receive 10 elements from rank 1, which has ended",
		},
		{
			"dropped receive", recursiveDoubling, broadcast,
			on(0, func([]Step) []Step { return nil }),
			3, 1, "waits forever to send 10 elements to rank 0, which has ended",
		},
		{
			"swapped sides", recursiveDoubling, reduce,
			map[int]func([]Step) []Step{0: at(1, func(s *Step) { s.Side = Left }), 1: at(1, func(s *Step) { s.Side = Right })},
			0, 4, "ends with another tree: ((1+0)+(2+3)), want ((0+1)+(2+3))",
		},
		{
			"one side", recursiveDoubling, reduce,
			on(3, at(2, func(s *Step) { s.Side = Right })),
			3, 4, "ends with another tree: ((2+3)+(0+1)), want ((0+1)+(2+3))",
		},
		{
			"wrong tree", recursiveDoubling, reduce,
			on(-1, func(plan []Step) []Step { plan[1], plan[2] = plan[2], plan[1]; return plan }),
			0, 4, "ends with another tree: ((0+2)+(1+3)), want ((0+1)+(2+3))",
		},
		{
			"folded first",
			Algorithm{Steps: foldFirst},
			five, nil,
			0, 6, "ends with another tree: (((0+4)+1)+(2+3)), want (((0+1)+(2+3))+4)",
		},
		{
			"contribution twice", recursiveDoubling, reduce,
			on(-1, func(plan []Step) []Step { return slices.Insert(plan, 2, plan[1]) }),
			0, 5, "ends with the contribution of rank 0 2 times",
		},
		{
			"contribution lost", recursiveDoubling, reduce,
			on(-1, at(1, func(s *Step) { s.Side = Replace; s.In.Buffer = Dst })),
			0, 4, "ends without the contribution of rank 1",
		},
		{
			"deadlock of orders",
			Algorithm{Steps: roundTable},
			Problem{Op: Barrier, Size: 3},
			nil,
			0, 0, "waits forever to receive 0 elements from rank 1, which is at step 0 (exchange nothing with 2, mine left)",
		},
		{
			"sends that need buffers",
			Algorithm{Steps: sendThenReceive},
			Problem{Op: Barrier, Size: 3},
			nil,
			0, 0, "waits forever to send 0 elements to rank 1, which is at step 0",
		},
		{
			"another length", recursiveDoubling, broadcast,
			on(3, at(0, func(s *Step) { s.In.Hi = 9 })),
			3, 0, "rank 1 sends 10 elements: src[0:10)",
		},
		{
			"another place", recursiveDoubling, broadcast,
			on(1, at(2, func(s *Step) { s.In.Hi--; s.Out.Lo++ })),
			1, 3, "ends with memory that was never written",
		},
		{
			"sends memory that was never written", recursiveDoubling, broadcast,
			on(1, at(0, func(s *Step) { s.Out.Buffer = Dst })),
			1, 0, "that was never written",
		},
		{
			"receives over what it sends", recursiveDoubling, reduce,
			on(0, at(1, func(s *Step) { s.Side = Replace })),
			0, 1, "receives over what it sends",
		},
		{
			"no peer", recursiveDoubling, reduce,
			on(0, at(1, func(s *Step) { s.To = 4 })),
			0, 1, "no peer to exchange with",
		},
		{
			"over the end", recursiveDoubling, reduce,
			on(2, at(0, func(s *Step) { s.In.Hi++; s.Out.Hi++ })),
			2, 0, "no span of 256 elements",
		},
		{
			"no division", recursiveDoubling,
			Problem{Op: AllReduce, Reduce: Mean, Size: 4, Count: 7},
			on(1, func(plan []Step) []Step { return slices.Delete(plan, 3, 4) }),
			1, 4, "ends with another tree: ((0+1)+(2+3)), want ((0+1)+(2+3))/n",
		},
		{
			"no result", recursiveDoubling, reduce,
			on(2, func(plan []Step) []Step { return plan[:3] }),
			2, 3, "ends with memory that was never written",
		},
		{
			"wrong root", recursiveDoubling, broadcast,
			on(1, at(2, func(s *Step) { s.In.Hi, s.Out.Hi = 9, 9 })),
			1, 3, "ends with memory that was never written",
		},
		{
			"missing first await", direct, reduce,
			on(1, func(plan []Step) []Step { return slices.Delete(plan, 1, 2) }),
			1, 1, "reads memory of rank 0, of which it does not know that it has entered",
		},
		{
			"missing last await", direct, reduce,
			on(2, func(plan []Step) []Step { return plan[:4] }),
			2, 4, "leaves while rank 0 may still use this memory",
		},
		{
			"missing signal", direct, reduce,
			on(3, func(plan []Step) []Step { return slices.Delete(plan, 3, 4) }),
			3, 4, "sets 1 flags, rank 0 of the same domain 2",
		},
		{
			"signal after await", direct, reduce,
			on(3, func(plan []Step) []Step { plan[0], plan[1] = plan[1], plan[0]; return plan }),
			0, 1, "waits forever for flag 0 of rank 3, which is at step 0 (await 0)",
		},
		{
			"signal too early", direct, reduce,
			on(3, func(plan []Step) []Step { plan[2], plan[3] = plan[3], plan[2]; return plan }),
			0, 5, "leaves while rank 3 may still use this memory",
		},
		{
			"flag twice", direct, reduce,
			on(0, at(3, func(s *Step) { s.Flag = 0 })),
			0, 3, "sets flag 0 twice",
		},
		{
			"flag out of order", direct, reduce,
			on(0, func(plan []Step) []Step { plan[0], plan[3] = plan[3], plan[0]; return plan }),
			0, 0, "sets flag 1 before flag 0",
		},
		{
			"slice of another", direct, reduce,
			on(1, at(2, func(s *Step) { s.In.Lo, s.Out.Lo = 0, 0 })),
			1, 2, "writes memory of rank 0 that rank 0 writes at the same time",
		},
		{
			"slice without an owner", direct, reduce,
			on(2, at(2, func(s *Step) { s.In.Lo, s.Out.Lo = 130, 130 })),
			0, 5, "ends with memory that was never written",
		},
		{
			"combines from destinations", direct, reduce,
			on(2, at(2, func(s *Step) { s.In.Buffer = Dst })),
			2, 2, "that was never written",
		},
		{
			"result in the source", direct, reduce,
			on(2, at(2, func(s *Step) { s.Out.Buffer = Src })),
			2, 2, "overwrites the source of rank 0",
		},
		{
			"wrong only in place",
			Algorithm{Steps: shareThenPull},
			Problem{Op: Broadcast, Size: 2, Count: 4, Root: 0},
			nil,
			1, 4, "reads memory of rank 0 that rank 0 writes at the same time",
		},
		{
			"wrong only in place, seen from the writer",
			Algorithm{Steps: shareThenPull},
			Problem{Op: Broadcast, Size: 2, Count: 4, Root: 1},
			nil,
			1, 5, "writes memory of rank 1 that rank 0 reads at the same time",
		},
		{
			"pulls from no rank", direct, broadcast,
			on(2, at(2, func(s *Step) { s.From = -1 })),
			2, 2, "no peer of its domain to read from",
		},
		{
			"pulls from the wrong rank", direct, broadcast,
			on(2, at(2, func(s *Step) { s.From = 0 })),
			2, 2, "no span of 0 elements",
		},
		{
			"barrier that lets go too soon", recursiveDoubling,
			Problem{Op: Barrier, Size: 4},
			on(-1, func(plan []Step) []Step { return plan[:1] }),
			0, 1, "leaves without knowing that rank 1 has entered",
		},
		{
			"no step", direct, reduce,
			on(0, at(0, func(s *Step) { s.Kind = 99 })),
			0, 0, "no kind of step",
		},
		{
			"leaves before a peer has arrived", eager,
			Problem{Op: Broadcast, Size: 3, Count: 4, Stage: 4},
			on(1, at(1, func(s *Step) { s.From = 0 })),
			1, 3, "leaves without knowing that rank 2 has entered",
		},
		{
			"reads a staging buffer too early", eager,
			Problem{Op: AllReduce, Size: 3, Count: 4, Stage: 4},
			on(2, func(plan []Step) []Step { plan[1], plan[3] = plan[3], plan[1]; return plan }),
			2, 1, "reads memory of rank 0, of which it does not know that it has entered",
		},
		{
			"window over one that peers read", staged,
			Problem{Op: AllReduce, Size: 2, Count: 640, Stage: 384},
			on(0, func(plan []Step) []Step {
				early := plan[11]
				return slices.Insert(slices.Delete(plan, 11, 12), 7, early)
			}),
			0, 7, "writes memory of rank 0 that rank 1 reads at the same time",
		},
		{
			"over the stage's end", eager,
			Problem{Op: AllReduce, Size: 3, Count: 4, Stage: 3},
			nil,
			0, 0, "no span of 3 elements",
		},
		{
			"private source", direct,
			Problem{Op: AllReduce, Size: 3, Count: 4, Private: true},
			nil,
			2, 2, "src of rank 0 is private",
		},
		{
			"source in another domain", direct,
			Problem{Op: AllReduce, Size: 2, Count: 4, Places: []Place{{}, {1, 1, 0}}},
			nil,
			0, 2, "rank 1 is of another domain",
		},
		{
			"pulls from another domain", direct,
			Problem{Op: AllGather, Size: 2, Count: 4, Places: []Place{{}, {1, 1, 0}}},
			nil,
			0, 3, "no peer of its domain to read from",
		},
		{
			"work of a peer", direct, broadcast,
			on(2, at(2, func(s *Step) { s.In.Buffer = Work })),
			2, 2, "work of rank 1 is its own",
		},
		{
			"no node", eager,
			Problem{Op: AllReduce, Size: 4, Count: 4, Stage: 4},
			on(0, at(3, func(s *Step) { s.Ranks = Ranks{1, 3} })),
			0, 3, "ranks 1 to 2 are not a node of the tree",
		},
		{
			"part of the ranks", eager,
			Problem{Op: AllReduce, Size: 4, Count: 4, Stage: 4},
			on(1, at(3, func(s *Step) { s.Ranks = Ranks{0, 2} })),
			1, 4, "ends without the contribution of rank 2: (0+1)",
		},
		{
			"part in the wrong place", directFrames,
			Problem{Op: AllGather, Size: 3, Count: 9},
			on(2, func(plan []Step) []Step { plan[1].In, plan[2].In = plan[2].In, plan[1].In; return plan }),
			2, 3, "ends with 1 from element 3 on, want 0",
		},
		{
			"block of another", directFrames,
			Problem{Op: AllToAll, Size: 3, Count: 9},
			on(1, func(plan []Step) []Step { plan[1].Out, plan[2].Out = plan[2].Out, plan[1].Out; return plan }),
			0, 3, "ends with 1 from element 6 on, want 1",
		},
		{
			"elements that do not overlap", directFrames,
			Problem{Op: ReduceScatter, Size: 2, Count: 8},
			on(0, at(1, func(s *Step) { s.Out = Span{Src, 3, 7} })),
			1, 1, "combines element 3 of 0 with element 4 of 1",
		},
		{
			"beyond the part in place",
			Algorithm{Steps: reduceScatterInSource},
			Problem{Op: ReduceScatter, Size: 2, Count: 8},
			nil,
			1, 1, "overwrites the source of rank 1",
		},
		{
			"combines what was rounded",
			Algorithm{Steps: roundsOnTheWay},
			Problem{Op: AllReduce, Size: 4, Count: 8},
			nil,
			3, 3, "combines (0+1), which was rounded",
		},
		{
			"divides what was rounded", recursiveDoubling,
			Problem{Op: AllReduce, Reduce: Mean, Size: 2, Count: 8},
			on(0, func(plan []Step) []Step {
				return append(plan[:2], duplicate(plan[1].In, first(Dst, 8)), scale(first(Dst, 8)))
			}),
			0, 3, "divides (0+1), which was rounded",
		},
		{
			"folds into itself", directFrames,
			Problem{Op: AllReduce, Size: 3, Count: 8},
			on(-1, func(plan []Step) []Step { return append(plan, fold(first(Work, 2), first(Work, 2), Left)) }),
			0, 6, "combines elements with themselves",
		},
		{
			"a third rank", directFrames,
			Problem{Op: Send, Size: 3, Count: 8, Peer: 1},
			on(2, func([]Step) []Step { return []Step{duplicate(first(Src, 0), first(Dst, 0))} }),
			2, 0, "takes part in what is between two other ranks",
		},
		{
			"halves that hold each other up",
			Algorithm{Steps: heldUp},
			Problem{Op: Barrier, Size: 3},
			nil,
			1, 0, "waits forever to send 0 elements to rank 2, which is at step 0 (receive nothing from 0)",
		},
		{
			"waits for the flag of a rank elsewhere", direct,
			Problem{Op: Barrier, Size: 2, Places: []Place{{}, {1, 1, 0}}},
			on(0, at(1, func(s *Step) { s.From = 1 })),
			0, 1, "no peer of its domain to wait for",
		},
		{
			"keeps over what others read", staged,
			Problem{Op: AllReduce, Size: 2, Count: 128, Stage: 384},
			on(1, at(3, func(s *Step) { s.Keep = s.Out })),
			1, 3, "keeps the result where it is written anyhow",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := Algorithm{Name: "broken", Fits: func(Problem) error { return nil }}
			a.Steps = func(p Problem, rank int) iter.Seq[Step] {
				plan := slices.Collect(c.of.Steps(p, rank))
				for _, r := range []int{rank, -1} {
					if f := c.broken[r]; f != nil {
						plan = f(plan)
					}
				}
				return slices.Values(plan)
			}
			err := Check(a, c.problem)
			var f *Fault
			if !errors.As(err, &f) {
				t.Fatalf("Check = %v, want a Fault", err)
			}
			if f.Rank != c.rank || f.Index != c.index || !strings.Contains(f.Reason, c.reason) {
				t.Errorf("got rank %d, step %d: %s\nwant rank %d, step %d: %s\n%v", f.Rank, f.Index, f.Reason, c.rank, c.index,
					c.reason, err)
			}
		})
	}
}

func on(rank int, f func([]Step) []Step) map[int]func([]Step) []Step {
	return map[int]func([]Step) []Step{rank: f}
}

func at(index int, f func(*Step)) func([]Step) []Step {
	return func(plan []Step) []Step {
		f(&plan[index])
		return plan
	}
}

// foldFirst is the usual recursive doubling for sizes that are not a power of two: rank 4 first joins rank 0, then the
// others double.
func foldFirst(p Problem, rank int) iter.Seq[Step] {
	work := p.all(Work)
	plan := []Step{duplicate(p.all(Src), work)}
	switch rank {
	case 4:
		plan = append(plan, send(0, work), receive(0, work))
	case 0:
		fold := receive(4, work)
		fold.Side = Right
		plan = append(plan, fold, combineWith(0, 1, work), combineWith(0, 2, work), send(4, work))
	default:
		plan = append(plan, combineWith(rank, rank^1, work), combineWith(rank, rank^2, work))
	}
	return slices.Values(append(plan, duplicate(work, p.all(Dst))))
}

// roundTable makes each of three ranks exchange with its right neighbour first, so that none progresses.
func roundTable(_ Problem, rank int) iter.Seq[Step] {
	right, left := (rank+1)%3, (rank+2)%3
	return slices.Values([]Step{combineWith(rank, right, Span{}), combineWith(rank, left, Span{})})
}

// heldUp makes rank 0 send to rank 1, which at the same time sends to rank 2, which first waits for rank 0. It would
// complete with frames of one segment.
func heldUp(_ Problem, rank int) iter.Seq[Step] {
	switch rank {
	case 0:
		return slices.Values([]Step{send(1, Span{}), send(2, Span{})})
	case 1:
		return slices.Values([]Step{exchange(2, Span{}, 0, Span{})})
	}
	return slices.Values([]Step{receive(0, Span{}), receive(1, Span{})})
}

// reduceScatterInSource exchanges the whole vector, of which only a part is the destination.
func reduceScatterInSource(p Problem, rank int) iter.Seq[Step] {
	step := combineWith(rank, 1-rank, p.all(Src))
	lo, hi := p.Part(rank)
	return slices.Values([]Step{duplicate(p.all(Src), p.all(Work)), step, duplicate(Span{Src, lo, hi}, first(Dst, hi-lo))})
}

// roundsOnTheWay makes every rank store its first partial sum in the destination.
func roundsOnTheWay(p Problem, rank int) iter.Seq[Step] {
	work, dst := p.all(Work), p.all(Dst)
	return slices.Values([]Step{
		duplicate(p.all(Src), work), combineWith(rank, rank^1, work), duplicate(work, dst), combineWith(rank, rank^2, dst),
		duplicate(dst, dst),
	})
}

func sendThenReceive(p Problem, rank int) iter.Seq[Step] {
	return slices.Values([]Step{
		send((rank+1)%p.Size, p.all(Src)),
		receive((rank+p.Size-1)%p.Size, p.all(Dst)),
	})
}

// shareThenPull broadcasts between two ranks; the root fills its own destination while the other pulls from the source:
// right, unless they are the same memory.
func shareThenPull(p Problem, rank int) iter.Seq[Step] {
	plan := []Step{signal(0), await(0)}
	if rank == p.Root {
		plan = append(plan, duplicate(p.all(Src), p.all(Work)), signal(1), await(1), duplicate(p.all(Work), p.all(Dst)),
			signal(2))
	} else {
		plan = append(plan, signal(1), await(1), pull(p.Root, p.all(Src), p.all(Dst)), signal(2))
	}
	return slices.Values(append(plan, await(2)))
}

func TestCheckSaysWhyNot(t *testing.T) {
	away := []Place{{}, {}, {Worker: 1, Domain: 1}}
	split := []Place{{}, {Worker: 1, Domain: 1}, {Domain: 1}}
	torn := []Place{{}, {Worker: 1, Domain: 1}, {Worker: 2, Domain: 1, Host: 1}}
	for _, c := range []struct {
		a    Algorithm
		p    Problem
		want string
	}{
		{direct, Problem{Op: AllReduce, Size: 3, Places: away}, "rank 2 is in domain 1, rank 0 in domain 0"},
		{
			eager,
			Problem{Op: AllReduce, Size: 3, Places: away},
			"eager needs every rank in one process, or on one host with shared memory",
		},
		{direct, Problem{Op: AllReduce, Size: 3, Private: true}, "some are private"},
		{direct, Problem{Op: Send, Size: 3, Peer: 1}, "1 others have none in a send"},
		{eager, Problem{Op: AllReduce, Size: 3, Count: 11, Stage: 10}, "11 elements, the staging buffer has 10"},
		{
			eager,
			Problem{Op: AllGather, Size: 2, Count: 11, Counts: []int{0, 11}, Stage: 10},
			"11 elements, the staging buffer has 10",
		},
		{
			staged,
			Problem{Op: AllReduce, Size: 3, Count: 11, Stage: 575},
			"a staging buffer of 576 elements at least, it has 575",
		},
		{recursiveDoubling, Problem{Op: AllToAll, Size: 3}, "no plan for all_to_all"},
		{recursiveDoubling, Problem{Op: 77, Size: 3}, "no plan for Op(77)"},
		{recursiveDoubling, Problem{Op: Recv, Size: 3}, "no plan for recv"},
		{recursiveDoubling, Problem{Op: AllReduce}, "0 ranks"},
		{direct, Problem{Op: AllReduce, Size: 2, Count: -1}, "-1 elements"},
		{direct, Problem{Op: Barrier, Size: 2, Count: 1}, "1 elements for a barrier"},
		{direct, Problem{Op: Broadcast, Size: 2, Root: 2}, "root 2 of 2 ranks"},
		{direct, Problem{Op: Send, Size: 2, Peer: 2}, "peer 2 of 2 ranks"},
		{direct, Problem{Op: Send, Size: 2, Root: 1, Peer: 1}, "rank 1 would send to itself"},
		{direct, Problem{Op: Broadcast, Size: 2, Stage: -1}, "a staging buffer of -1 elements"},
		{direct, Problem{Op: Broadcast, Size: 2, Places: away}, "3 places for 2 ranks"},
		{
			directFrames,
			Problem{Op: Broadcast, Size: 3, Places: split},
			"worker 0 is in domain 0, and rank 2 of it in domain 1",
		},
		{directFrames, Problem{Op: Broadcast, Size: 3, Places: torn}, "domain 1 is on host 0, and rank 2 of it on host 1"},
		{direct, Problem{Op: AllReduce, Size: 2, Counts: []int{1, 2}}, "counts by rank given for all_reduce"},
		{direct, Problem{Op: Gather, Size: 2, Counts: []int{1, 2, 3}}, "3 counts for 2 ranks"},
		{direct, Problem{Op: Gather, Size: 2, Count: 1, Counts: []int{2, -1}}, "-1 elements for rank 1"},
		{
			direct,
			Problem{Op: Gather, Size: 2, Count: 4, Counts: []int{1, 2}},
			"the counts by rank are 3 elements, the vector has 4",
		},
		{direct, Problem{Op: AllToAll, Size: 2, Count: 3}, "3 elements cannot be divided into 2 equal parts"},
	} {
		t.Run(fmt.Sprintf("%s/%s", c.a.Name, c.want), func(t *testing.T) {
			if err := Check(c.a, c.p); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Check = %v, want %q", err, c.want)
			}
		})
	}
}

// combineWith returns the step in which two ranks combine their vectors; the lower rank's is the left operand.
func combineWith(rank, peer int, s Span) Step {
	side := Right
	if peer < rank {
		side = Left
	}
	return Step{Kind: Exchange, To: peer, From: peer, Out: s, In: s, Side: side}
}
