package plan

import "time"

// costs is what the moves of a plan take on some links.
type costs struct {
	Links
	places []Place
	frames Link    // the slowest way between two of the ranks
	shares float64 // by how many ranks a processor is shared, at least 1
}

// of returns what the problem's plans have to reckon with.
func (l Links) of(p Problem) costs {
	c := costs{Links: l, places: p.Places, frames: l.Host, shares: 1}
	most, ranks := 0, map[int]int{}
	for _, at := range p.Places {
		if at.Host != p.Places[0].Host {
			c.frames = l.Network
		}
		ranks[at.Host]++
		most = max(most, ranks[at.Host])
	}
	if p.Places == nil {
		most = p.Size
	}
	if l.Cores > 0 && most > l.Cores {
		c.shares = float64(most) / float64(l.Cores)
	}
	return c
}

// frame is the time that one frame of so many elements takes over the slowest link.
func (c costs) frame(elements int) time.Duration { return c.over(c.frames, elements) }

// link returns the way between two ranks by frames.
func (c costs) link(a, b int) Link {
	if c.places != nil && c.places[a].Host != c.places[b].Host {
		return c.Network
	}
	return c.Host
}

// between returns the slowest link of a round in which every rank has the peer given, if that is a rank.
func (c costs) between(peer func(rank int) int) Link {
	for rank := range c.places {
		if other := peer(rank); other >= 0 && other < len(c.places) && c.link(rank, other) == c.Network {
			return c.Network
		}
	}
	return c.Host
}

// above returns the slowest link of a round in which every rank has the peer so far above it, around the end.
func (c costs) above(distance int) Link {
	return c.between(func(rank int) int { return (rank + distance) % len(c.places) })
}

// over is the time that one frame takes over a link.
func (c costs) over(l Link, elements int) time.Duration {
	return l.Latency + duration(elements*c.ElementBytes, l.Bandwidth)
}

// combining is the time in which a rank reads so many elements while it reduces, of all operands together.
func (c costs) combining(elements int) time.Duration { return c.computing(elements, c.Combine) }

// copying is the time in which a rank copies so many elements in its own memory.
func (c costs) copying(elements int) time.Duration { return c.computing(elements, c.Copy) }

// reading is the time in which a rank copies so many elements from another's memory, or to it.
func (c costs) reading(elements int) time.Duration { return c.computing(elements, c.Memory.Bandwidth) }

func (c costs) computing(elements int, rate float64) time.Duration {
	return time.Duration(c.shares * float64(duration(elements*c.ElementBytes, rate)))
}

// syncs is the time of so many synchronisations of a domain.
func (c costs) syncs(n int) time.Duration { return time.Duration(n) * c.Memory.Latency }

// duration is how long bytes take at a rate in bytes a second; an unknown rate (0) costs nothing.
func duration(bytes int, rate float64) time.Duration {
	if rate <= 0 {
		return 0
	}
	return time.Duration(float64(bytes) / rate * float64(time.Second))
}
