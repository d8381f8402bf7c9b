package plan

import (
	"fmt"
	"time"
)

// The steps that plans are made of.

func signal(mark int) Step { return Step{Kind: Signal, To: -1, From: -1, Mark: mark} }
func await(mark int) Step  { return Step{Kind: Await, To: -1, From: -1, Mark: mark} }

func combine(size, lo, hi int) Step {
	return Step{Kind: Combine, To: -1, From: -1, In: Span{Src, lo, hi}, Out: Span{Dst, lo, hi}, Ranks: Ranks{0, size}}
}

func pull(from int, in, out Span) Step {
	return Step{Kind: Pull, To: -1, From: from, In: in, Out: out}
}

func duplicate(in, out Span) Step { return Step{Kind: Copy, To: -1, From: -1, In: in, Out: out} }
func scale(out Span) Step         { return Step{Kind: Scale, To: -1, From: -1, Out: out} }

func send(to int, out Span) Step     { return Step{Kind: Exchange, To: to, From: -1, Out: out} }
func receive(from int, in Span) Step { return Step{Kind: Exchange, To: -1, From: from, In: in} }

// all is the whole of a buffer.
func (p Problem) all(b Buffer) Span { return Span{Buffer: b, Hi: p.Count} }

// check returns what makes the problem no problem.
func (p Problem) check() error {
	switch {
	case p.Op < AllReduce || p.Op > Barrier:
		return fmt.Errorf("no plan for %v", p.Op)
	case p.Size < 1:
		return fmt.Errorf("%d ranks", p.Size)
	case p.Count < 0:
		return fmt.Errorf("%d elements", p.Count)
	case p.Counts != nil:
		return fmt.Errorf("counts by rank given for %v, which has one count", p.Op)
	case p.Root < 0 || p.Root >= p.Size:
		return fmt.Errorf("root %d of %d ranks", p.Root, p.Size)
	case p.Places != nil && len(p.Places) != p.Size:
		return fmt.Errorf("%d places for %d ranks", len(p.Places), p.Size)
	}
	return nil
}

// frame is the time that one frame of so many elements takes.
func (l Links) frame(elements int) time.Duration {
	return l.Network.Latency + duration(elements*l.ElementBytes, l.Network.Bandwidth)
}

// combining is the time in which a rank reads so many elements while it reduces.
func (l Links) combining(elements int) time.Duration {
	return duration(elements*l.ElementBytes, l.Combine)
}

// duration is how long bytes take at a rate in bytes a second; an unknown rate (0) costs nothing.
func duration(bytes int, rate float64) time.Duration {
	if rate <= 0 {
		return 0
	}
	return time.Duration(float64(bytes) / rate * float64(time.Second))
}
