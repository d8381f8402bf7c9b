package plan

// Constructors of the steps that plans consist of.

func signal(flag int) Step { return Step{Kind: Signal, To: -1, From: -1, Flag: flag} }
func await(flag int) Step  { return Step{Kind: Await, To: -1, From: -1, Flag: flag} }

// awaitRank waits for the flag of one rank.
func awaitRank(rank, flag int) Step { return Step{Kind: Await, To: -1, From: rank, Flag: flag} }

// combine combines the operands of some ranks into memory of rank to, or with -1 of every rank of the domain.
func combine(r Ranks, in Span, to int, out Span) Step {
	return Step{Kind: Combine, To: to, From: -1, In: in, Out: out, Ranks: r}
}

func pull(from int, in, out Span) Step {
	return Step{Kind: Pull, To: -1, From: from, In: in, Out: out}
}

func push(to int, in, out Span) Step {
	return Step{Kind: Push, To: to, From: -1, In: in, Out: out}
}

func duplicate(in, out Span) Step { return Step{Kind: Copy, To: -1, From: -1, In: in, Out: out} }
func scale(out Span) Step         { return Step{Kind: Scale, To: -1, From: -1, Out: out} }

// fold combines in into out, with in as the operand on the given side.
func fold(in, out Span, side Side) Step {
	return Step{Kind: Fold, To: -1, From: -1, In: in, Out: out, Side: side}
}

func send(to int, out Span) Step     { return Step{Kind: Exchange, To: to, From: -1, Out: out} }
func receive(from int, in Span) Step { return Step{Kind: Exchange, To: -1, From: from, In: in} }

func exchange(to int, out Span, from int, in Span) Step {
	return Step{Kind: Exchange, To: to, From: from, Out: out, In: in}
}

// all is the whole vector in a buffer.
func (p Problem) all(b Buffer) Span { return Span{Buffer: b, Hi: p.Count} }

// part is a rank's part of the vector in a buffer.
func (p Problem) part(b Buffer, rank int) Span {
	lo, hi := p.Part(rank)
	return Span{b, lo, hi}
}

// first is the first elements of a buffer.
func first(b Buffer, count int) Span { return Span{b, 0, count} }
