package library

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// pair identifies matching calls of two local ranks.
type pair struct {
	from, to int
	seq      uint64
}

// meeting is the half of such a pair that arrived first.
type meeting struct {
	call  *collective.Call
	count int
	print uint64
	taken bool
	err   error
	done  chan error
}

// exchange executes a Send or a Recv.
func (m *member) exchange(w *wait, count int) error {
	if t := m.team; t.at[w.call.Peer].process != t.backend.Rank() {
		return m.exchangeFar(w, count)
	}
	return m.exchangeNear(w, count)
}

// exchangeNear copies from one local rank to another: the rank that arrives second copies.
func (m *member) exchangeNear(w *wait, count int) error {
	t := m.team
	key := pair{m.rank, w.call.Peer, w.seq}
	if w.call.Op == collective.Recv {
		key.from, key.to = key.to, key.from
	}
	print := pairPrint(t, w, count)
	t.mu.Lock()
	first := t.pairs[key]
	if first == nil {
		first = &meeting{call: w.call, count: count, print: print, done: make(chan error)}
		t.pairs[key] = first
		t.mu.Unlock()
		return m.awaitPair(w, first)
	}
	delete(t.pairs, key)
	if t.cause() != nil {
		t.mu.Unlock()
		return t.cause()
	}
	first.taken = true
	t.mu.Unlock()
	if first.print != print {
		first.err = t.fail(w.failure(collective.ErrMismatch, fmt.Errorf("rank %d calls %s, rank %d calls %s",
			m.rank, textOf(w.call, count), w.call.Peer, textOf(first.call, first.count))), m.rank)
	} else if w.call.Op == collective.Send {
		copy(first.call.Dst.HostBytes(), w.call.Src.HostBytes())
	} else {
		copy(w.call.Dst.HostBytes(), first.call.Src.HostBytes())
	}
	close(first.done)
	return first.err
}

func (m *member) awaitPair(w *wait, first *meeting) error {
	w.missing = func() []int { return []int{w.call.Peer} }
	err := w.on(first.done)
	if err == nil {
		return first.err
	}
	m.team.mu.Lock()
	taken := first.taken
	m.team.mu.Unlock()
	if taken {
		<-first.done
		err = first.err
	}
	return err
}

// pairPrint is a hash of what both halves must agree on.
func pairPrint(t *team, w *wait, count int) uint64 {
	c := *w.call
	c.Op = collective.Send
	return t.fingerprint(w.seq, &c, count)
}

// headerBytes is the length of the header of a message: the fingerprint, then the text of the sender's call.
const headerBytes = 256

// exchangeFar sends to, or receives from, a rank of another process: one message with a header.
func (m *member) exchangeFar(w *wait, count int) error {
	t := m.team
	peer := t.at[w.call.Peer]
	message := make([]byte, headerBytes+count*w.call.Type.Bytes())
	o := Operation{Op: w.call.Op, Type: tensor.Uint8, Count: len(message), Peer: peer.process, Keep: message}
	w.missing = func() []int { return []int{w.call.Peer} }
	print := pairPrint(t, w, count)
	if w.call.Op == collective.Send {
		o.Tag, o.Src = m.local*localMax+peer.local, start(message)
		binary.NativeEndian.PutUint64(message, print)
		copy(message[8:headerBytes], textOf(w.call, count))
		copy(message[headerBytes:], w.call.Src.HostBytes())
		return w.outcome(w.on(t.backend.Start(o)))
	}
	o.Tag, o.Dst = peer.local*localMax+m.local, start(message)
	if err := w.on(t.backend.Start(o)); err != nil {
		if errors.Is(err, collective.ErrMismatch) {
			err = fmt.Errorf("rank %d sends more than rank %d receives, which calls %s: %w", w.call.Peer, m.rank, textOf(w.call, count), err)
		}
		return w.outcome(err)
	}
	if binary.NativeEndian.Uint64(message) != print {
		theirs, _, _ := bytes.Cut(message[8:headerBytes], []byte{0})
		return t.fail(w.failure(collective.ErrMismatch, fmt.Errorf("rank %d calls %s, rank %d calls %s", w.call.Peer, theirs, m.rank, textOf(w.call, count))), m.rank)
	}
	copy(w.call.Dst.HostBytes(), message[headerBytes:])
	return nil
}
