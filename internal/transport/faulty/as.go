package faulty

import "github.com/lockstep-ml/lockstep/transport"

// as returns the end with the methods that the wrapped one has: what a caller can do, it finds out by asking for interfaces, so
// the end must have neither more nor less of them. It is long because each set of interfaces is a type of its own.
func (e *end) as() transport.Endpoint {
	has := 0
	note := func(bit int, ok bool) {
		if ok {
			has |= bit
		}
	}
	_, isMarker := e.Endpoint.(transport.Marker)
	note(1, isMarker)
	_, isPoster := e.Endpoint.(transport.Poster)
	note(2, isPoster)
	_, isAllocator := e.Endpoint.(transport.Allocator)
	note(4, isAllocator)
	_, isAsker := e.Endpoint.(transport.Asker)
	note(8, isAsker)
	_, isPlacer := e.Endpoint.(transport.Placer)
	note(16, isPlacer)
	_, isSplitter := e.Endpoint.(transport.Splitter)
	note(32, isSplitter)
	m, p, b, t, l, s := marks{e}, posts{e}, buffers{e}, texts{e}, places{e}, parts{e}
	switch has {
	case 1:
		return struct {
			*end
			marks
		}{e, m}
	case 2:
		return struct {
			*end
			posts
		}{e, p}
	case 3:
		return struct {
			*end
			marks
			posts
		}{e, m, p}
	case 4:
		return struct {
			*end
			buffers
		}{e, b}
	case 5:
		return struct {
			*end
			marks
			buffers
		}{e, m, b}
	case 6:
		return struct {
			*end
			posts
			buffers
		}{e, p, b}
	case 7:
		return struct {
			*end
			marks
			posts
			buffers
		}{e, m, p, b}
	case 8:
		return struct {
			*end
			texts
		}{e, t}
	case 9:
		return struct {
			*end
			marks
			texts
		}{e, m, t}
	case 10:
		return struct {
			*end
			posts
			texts
		}{e, p, t}
	case 11:
		return struct {
			*end
			marks
			posts
			texts
		}{e, m, p, t}
	case 12:
		return struct {
			*end
			buffers
			texts
		}{e, b, t}
	case 13:
		return struct {
			*end
			marks
			buffers
			texts
		}{e, m, b, t}
	case 14:
		return struct {
			*end
			posts
			buffers
			texts
		}{e, p, b, t}
	case 15:
		return struct {
			*end
			marks
			posts
			buffers
			texts
		}{e, m, p, b, t}
	case 16:
		return struct {
			*end
			places
		}{e, l}
	case 17:
		return struct {
			*end
			marks
			places
		}{e, m, l}
	case 18:
		return struct {
			*end
			posts
			places
		}{e, p, l}
	case 19:
		return struct {
			*end
			marks
			posts
			places
		}{e, m, p, l}
	case 20:
		return struct {
			*end
			buffers
			places
		}{e, b, l}
	case 21:
		return struct {
			*end
			marks
			buffers
			places
		}{e, m, b, l}
	case 22:
		return struct {
			*end
			posts
			buffers
			places
		}{e, p, b, l}
	case 23:
		return struct {
			*end
			marks
			posts
			buffers
			places
		}{e, m, p, b, l}
	case 24:
		return struct {
			*end
			texts
			places
		}{e, t, l}
	case 25:
		return struct {
			*end
			marks
			texts
			places
		}{e, m, t, l}
	case 26:
		return struct {
			*end
			posts
			texts
			places
		}{e, p, t, l}
	case 27:
		return struct {
			*end
			marks
			posts
			texts
			places
		}{e, m, p, t, l}
	case 28:
		return struct {
			*end
			buffers
			texts
			places
		}{e, b, t, l}
	case 29:
		return struct {
			*end
			marks
			buffers
			texts
			places
		}{e, m, b, t, l}
	case 30:
		return struct {
			*end
			posts
			buffers
			texts
			places
		}{e, p, b, t, l}
	case 31:
		return struct {
			*end
			marks
			posts
			buffers
			texts
			places
		}{e, m, p, b, t, l}
	case 32:
		return struct {
			*end
			parts
		}{e, s}
	case 33:
		return struct {
			*end
			marks
			parts
		}{e, m, s}
	case 34:
		return struct {
			*end
			posts
			parts
		}{e, p, s}
	case 35:
		return struct {
			*end
			marks
			posts
			parts
		}{e, m, p, s}
	case 36:
		return struct {
			*end
			buffers
			parts
		}{e, b, s}
	case 37:
		return struct {
			*end
			marks
			buffers
			parts
		}{e, m, b, s}
	case 38:
		return struct {
			*end
			posts
			buffers
			parts
		}{e, p, b, s}
	case 39:
		return struct {
			*end
			marks
			posts
			buffers
			parts
		}{e, m, p, b, s}
	case 40:
		return struct {
			*end
			texts
			parts
		}{e, t, s}
	case 41:
		return struct {
			*end
			marks
			texts
			parts
		}{e, m, t, s}
	case 42:
		return struct {
			*end
			posts
			texts
			parts
		}{e, p, t, s}
	case 43:
		return struct {
			*end
			marks
			posts
			texts
			parts
		}{e, m, p, t, s}
	case 44:
		return struct {
			*end
			buffers
			texts
			parts
		}{e, b, t, s}
	case 45:
		return struct {
			*end
			marks
			buffers
			texts
			parts
		}{e, m, b, t, s}
	case 46:
		return struct {
			*end
			posts
			buffers
			texts
			parts
		}{e, p, b, t, s}
	case 47:
		return struct {
			*end
			marks
			posts
			buffers
			texts
			parts
		}{e, m, p, b, t, s}
	case 48:
		return struct {
			*end
			places
			parts
		}{e, l, s}
	case 49:
		return struct {
			*end
			marks
			places
			parts
		}{e, m, l, s}
	case 50:
		return struct {
			*end
			posts
			places
			parts
		}{e, p, l, s}
	case 51:
		return struct {
			*end
			marks
			posts
			places
			parts
		}{e, m, p, l, s}
	case 52:
		return struct {
			*end
			buffers
			places
			parts
		}{e, b, l, s}
	case 53:
		return struct {
			*end
			marks
			buffers
			places
			parts
		}{e, m, b, l, s}
	case 54:
		return struct {
			*end
			posts
			buffers
			places
			parts
		}{e, p, b, l, s}
	case 55:
		return struct {
			*end
			marks
			posts
			buffers
			places
			parts
		}{e, m, p, b, l, s}
	case 56:
		return struct {
			*end
			texts
			places
			parts
		}{e, t, l, s}
	case 57:
		return struct {
			*end
			marks
			texts
			places
			parts
		}{e, m, t, l, s}
	case 58:
		return struct {
			*end
			posts
			texts
			places
			parts
		}{e, p, t, l, s}
	case 59:
		return struct {
			*end
			marks
			posts
			texts
			places
			parts
		}{e, m, p, t, l, s}
	case 60:
		return struct {
			*end
			buffers
			texts
			places
			parts
		}{e, b, t, l, s}
	case 61:
		return struct {
			*end
			marks
			buffers
			texts
			places
			parts
		}{e, m, b, t, l, s}
	case 62:
		return struct {
			*end
			posts
			buffers
			texts
			places
			parts
		}{e, p, b, t, l, s}
	case 63:
		return struct {
			*end
			marks
			posts
			buffers
			texts
			places
			parts
		}{e, m, p, b, t, l, s}
	}
	return e
}
