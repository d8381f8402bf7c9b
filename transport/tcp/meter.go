package tcp

import (
	"slices"
	"sync"
	"time"
)

// Meter measures the data connections of nodes with processes on other hosts ([Config.Meter]), on Linux. The zero value
// is ready. Its methods may be called concurrently.
type Meter struct {
	mu      sync.Mutex
	streams []*meteredStream
}

// Traffic is what the connections with one rank did in a time. Of several at the same time, the times are the longest.
type Traffic struct {
	Rank int // of the peer, among those of GroupConfig.Addrs
	// Sending is the time with data that was sent and not acknowledged, or not sent yet, without the time in which the
	// peer's receive buffer was full.
	Sending time.Duration
	// Receiving is the time that ranks of this process waited for frames from the peer.
	Receiving time.Duration
	Bytes     int64 // that the peer has acknowledged
}

// meteredStream is a stream with the state of its counters at the last Read.
type meteredStream struct {
	*stream
	rank    int
	info    *socketInfo
	sent    uint64
	unread  bool // data that was sent before the last Read may be acknowledged after it
	waited  time.Duration
	sending time.Duration
	bytes   int64
}

func (m *Meter) add(s *stream, rank int, info *socketInfo) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.streams = append(m.streams, &meteredStream{stream: s, rank: rank, info: info})
}

func (m *Meter) remove(s *stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.streams = slices.DeleteFunc(m.streams, func(old *meteredStream) bool { return old.stream == s })
}

// Read appends to list the traffic with each rank since the last Read, if there was any, and returns the result. It
// costs a system call for each connection that has sent data, or whose data was not acknowledged, and allocates only if
// list has no room.
func (m *Meter) Read(list []Traffic) []Traffic {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.streams {
		t := s.read()
		if t.Bytes == 0 && t.Receiving == 0 && t.Sending == 0 {
			continue
		}
		i := slices.IndexFunc(list, func(other Traffic) bool { return other.Rank == s.rank })
		if i < 0 {
			list = append(list, t)
			continue
		}
		sum := &list[i]
		sum.Sending, sum.Receiving = max(sum.Sending, t.Sending), max(sum.Receiving, t.Receiving)
		sum.Bytes += t.Bytes
	}
	return list
}

// read returns the traffic since the last call.
func (s *meteredStream) read() Traffic {
	t := Traffic{Rank: s.rank}
	waited := time.Duration(s.received.Load())
	t.Receiving, s.waited = waited-s.waited, waited
	if sent := s.progress.Load(); sent != s.sent || s.unread {
		sending, bytes, ok := s.info.read()
		if ok {
			t.Sending, s.sending = max(0, sending-s.sending), sending
			t.Bytes, s.bytes = max(0, bytes-s.bytes), bytes
		}
		s.unread = ok && (sent != s.sent || uint64(s.bytes) < sent)
		s.sent = sent
	}
	return t
}
