package plan

import "fmt"

// malformed returns the first step that is invalid by itself, or a fault if ranks of a domain set different
// numbers of flags.
func (x *proof) malformed() *Fault {
	for rank := range x.ranks {
		plan := x.ranks[rank].plan
		if len(plan) > 0 && !x.problem(rank).takesPart(rank) {
			return &Fault{Rank: rank, Step: plan[0], Reason: "takes part in what is between two other ranks"}
		}
		for index := range plan {
			if reason, span := x.wrongStep(rank, &plan[index]); reason != "" {
				return &Fault{Rank: rank, Index: index, Step: plan[index], Span: span, Reason: reason}
			}
		}
	}
	return x.unequalFlags()
}

func (x *proof) unequalFlags() *Fault {
	for _, d := range x.domains {
		first := x.flagsOf(d.ranks[0])
		for _, rank := range d.ranks[1:] {
			if n := x.flagsOf(rank); n != first {
				return &Fault{
					Rank: rank, Index: len(x.ranks[rank].plan),
					Reason: fmt.Sprintf("sets %d flags, rank %d of the same domain %d", n, d.ranks[0], first),
				}
			}
		}
	}
	return nil
}

func (x *proof) flagsOf(rank int) int {
	n := 0
	for i := range x.ranks[rank].plan {
		if x.ranks[rank].plan[i].Kind == Signal {
			n++
		}
	}
	return n
}

// wrongStep returns what is wrong with a step by itself, and the span concerned.
func (x *proof) wrongStep(rank int, s *Step) (string, Span) {
	for _, span := range s.spans() {
		if span.Buffer > Stage || span.Lo < 0 || span.Hi < span.Lo {
			return "no span", span
		}
	}
	neighbour := func(r int) bool { return x.peer(rank, r) && x.domainOf[r] == x.domainOf[rank] }
	switch s.Kind {
	case Exchange:
		return x.wrongExchange(rank, s)
	case Signal:
		if s.Flag < 0 {
			return "no flag", s.Out
		}
		return "", Span{}
	case Await:
		switch {
		case s.Flag < 0:
			return "no flag", s.Out
		case s.From != -1 && !neighbour(s.From):
			return "no peer of its domain to wait for", s.Out
		}
		return "", Span{}
	case Combine:
		return x.wrongCombine(rank, s)
	case Pull:
		if !neighbour(s.From) {
			return "no peer of its domain to read from", s.In
		}
		return x.wrongMove(rank, s, s.From, rank)
	case Push:
		if !neighbour(s.To) {
			return "no peer of its domain to write to", s.Out
		}
		return x.wrongMove(rank, s, rank, s.To)
	case Copy:
		return x.wrongMove(rank, s, rank, rank)
	case Fold:
		switch {
		case s.Side != Left && s.Side != Right:
			return "no side", s.In
		case x.overlap(rank, s.In, s.Out):
			return "combines elements with themselves", s.Out
		}
		return x.wrongMove(rank, s, rank, rank)
	case Scale:
		return x.reach(rank, rank, s.Out), s.Out
	}
	return "no kind of step", s.Out
}

func (x *proof) peer(rank, r int) bool { return r >= 0 && r < len(x.ranks) && r != rank }

func (x *proof) wrongExchange(rank int, s *Step) (string, Span) {
	switch {
	case s.To < 0 && s.From < 0 || s.To >= 0 && !x.peer(rank, s.To) || s.From >= 0 && !x.peer(rank, s.From):
		return "no peer to exchange with", s.Out
	case s.Side > Right:
		return "no side", s.In
	case s.To >= 0 && s.From >= 0 && x.overlap(rank, s.In, s.Out) && !(x.same(rank, s.In, s.Out) && s.Side != Replace):
		return "receives over what it sends at the same time", s.In
	}
	for _, span := range []Span{s.In, s.Out, s.Own} {
		if reason := x.reach(rank, rank, span); reason != "" {
			return reason, span
		}
	}
	return x.wrongOwn(rank, s), s.Own
}

// wrongOwn returns what is wrong with the operand that an Exchange combines in place of its In.
func (x *proof) wrongOwn(rank int, s *Step) string {
	switch {
	case s.Own.length() == 0:
		return ""
	case s.From < 0 || s.Side == Replace:
		return "is combined with nothing"
	case s.Own.length() != s.In.length():
		return fmt.Sprintf("in is %v, of another length", s.In)
	case x.overlap(rank, s.Own, s.In) && !x.same(rank, s.Own, s.In):
		return "moves elements within one memory over themselves"
	}
	return ""
}

// wrongMove checks a step that reads In of one rank and writes Out of one.
func (x *proof) wrongMove(rank int, s *Step, from, to int) (string, Span) {
	if s.In.length() != s.Out.length() {
		return fmt.Sprintf("in is %v, of another length", s.In), s.Out
	}
	if reason := x.reach(rank, from, s.In); reason != "" {
		return reason, s.In
	}
	if reason := x.reach(rank, to, s.Out); reason != "" {
		return reason, s.Out
	}
	if from == to && x.overlap(rank, s.In, s.Out) && !x.same(rank, s.In, s.Out) {
		return "moves elements within one memory over themselves", s.Out
	}
	return "", Span{}
}

func (x *proof) wrongCombine(rank int, s *Step) (string, Span) {
	if !isNode(len(x.ranks), s.Ranks) {
		return fmt.Sprintf("ranks %d to %d are not a node of the tree", s.Ranks.Lo, s.Ranks.Hi-1), s.In
	}
	if s.To != -1 && s.To != rank && !x.peer(rank, s.To) || s.To >= 0 && x.domainOf[s.To] != x.domainOf[rank] {
		return "no peer of its domain to write to", s.Out
	}
	length := s.In.length()
	for _, span := range s.spans() {
		if n := span.length(); n != length && (n > 0 || span == s.Out) {
			return fmt.Sprintf("in is %v, of another length", s.In), span
		}
	}
	targets := x.written(rank, s)
	for owner := s.Ranks.Lo; owner < s.Ranks.Hi; owner++ {
		in := s.In
		if owner == rank && s.Own.length() > 0 {
			in = s.Own
		}
		if x.domainOf[owner] != x.domainOf[rank] {
			return fmt.Sprintf("rank %d is of another domain", owner), in
		}
		if reason := x.reach(rank, owner, in); reason != "" {
			return reason, in
		}
	}
	for _, owner := range targets {
		if reason := x.reach(rank, owner, s.Out); reason != "" {
			return reason, s.Out
		}
		read := owner >= s.Ranks.Lo && owner < s.Ranks.Hi
		in := s.In
		if owner == rank && s.Own.length() > 0 {
			in = s.Own
		}
		if read && x.overlap(owner, in, s.Out) && !x.same(owner, in, s.Out) {
			return "moves elements within one memory over themselves", s.Out
		}
	}
	return x.wrongKeep(rank, s)
}

// wrongKeep checks the span in which a Combine stores its result a second time.
func (x *proof) wrongKeep(rank int, s *Step) (string, Span) {
	if reason := x.reach(rank, rank, s.Keep); reason != "" || s.Keep.length() == 0 {
		return reason, s.Keep
	}
	in := s.In
	if s.Own.length() > 0 {
		in = s.Own
	}
	if s.Ranks.Lo <= rank && rank < s.Ranks.Hi && x.overlap(rank, in, s.Keep) && !x.same(rank, in, s.Keep) {
		return "moves elements within one memory over themselves", s.Keep
	}
	if (s.To == -1 || s.To == rank) && x.overlap(rank, s.Out, s.Keep) {
		return "keeps the result where it is written anyhow", s.Keep
	}
	return "", Span{}
}

// reach returns the reason why a rank cannot access a span of the owner, or "".
func (x *proof) reach(rank, owner int, s Span) string {
	v := x.ranks[owner].views[s.Buffer]
	switch {
	case s.Hi > v.length && s.length() > 0:
		return fmt.Sprintf("no span of %d elements", v.length)
	case rank == owner || s.length() == 0 || s.Buffer == Stage:
		return ""
	case s.Buffer == Work || s.Buffer == Scratch:
		return fmt.Sprintf("%v of rank %d is its own", s.Buffer, owner)
	case x.problem(rank).Private:
		return fmt.Sprintf("%v of rank %d is private", s.Buffer, owner)
	}
	return ""
}
