package plan

import "time"

// costs is the cost of a plan's transfers on some links.
type costs struct {
	Links
	places []Place
	frames Link    // the slowest link between two of the ranks
	shares float64 // the number of ranks that share a processor, at least 1
}

// of returns the costs that apply to the problem's plans.
func (l Links) of(p Problem) costs {
	c := costs{Links: l, places: p.Places, frames: l.Host, shares: 1}
	most, several := p.mostOnHost()
	if several {
		c.frames = l.Network
	}
	if l.Cores > 0 && most > l.Cores {
		c.shares = float64(most) / float64(l.Cores)
	}
	return c
}

// frame returns the time of one frame with this many elements over the slowest link.
func (c costs) frame(elements int) time.Duration { return c.over(c.frames, elements) }

// link returns the link between two ranks for frames.
func (c costs) link(a, b int) Link {
	if c.places != nil && c.places[a].Host != c.places[b].Host {
		return c.Network
	}
	return c.Host
}

// over returns the time of one frame over a link.
func (c costs) over(l Link, elements int) time.Duration {
	return l.Latency + duration(elements*c.ElementBytes, l.Bandwidth)
}

// combining returns the time in which a rank reads this many elements while it reduces, summed over all
// operands.
func (c costs) combining(elements int) time.Duration { return c.computing(elements, c.Combine) }

// copying returns the time in which a rank copies this many elements in its own memory.
func (c costs) copying(elements int) time.Duration { return c.computing(elements, c.Copy) }

// reading returns the time in which a rank copies this many elements from or to another rank's memory.
func (c costs) reading(elements int) time.Duration { return c.computing(elements, c.Memory.Bandwidth) }

func (c costs) computing(elements int, rate float64) time.Duration {
	return time.Duration(c.shares * float64(duration(elements*c.ElementBytes, rate)))
}

// syncs returns the time of n synchronisations of a domain.
func (c costs) syncs(n int) time.Duration { return time.Duration(n) * c.Memory.Latency }

// duration returns the time of a transfer at a rate in bytes per second; an unknown rate (0) costs nothing.
func duration(bytes int, rate float64) time.Duration {
	if rate <= 0 {
		return 0
	}
	return time.Duration(float64(bytes) / rate * float64(time.Second))
}
