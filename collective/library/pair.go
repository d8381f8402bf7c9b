package library

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/tensor"
)

// pair identifies matching calls of two local ranks.
type pair struct {
	from, to int
	seq      uint64
}

// meeting is the half of such a pair that arrived first.
type meeting struct {
	*wait
	taken bool
	err   error
	done  chan error
}

// exchange executes a Send or a Recv.
func (m *rank) exchange(w *wait) error {
	if t := m.team; t.at[w.Call.Peer].process != t.driver.Rank() {
		return m.exchangeFar(w)
	}
	return m.exchangeNear(w)
}

// exchangeNear copies from one local rank to another: the rank that arrives second copies.
func (m *rank) exchangeNear(w *wait) error {
	t := m.team
	key := pair{m.rank, w.Call.Peer, w.Seq()}
	if w.Call.Op == collective.Recv {
		key.from, key.to = key.to, key.from
	}
	t.mu.Lock()
	first := t.pairs[key]
	if first == nil {
		first = &meeting{wait: w, done: make(chan error)}
		t.pairs[key] = first
		t.mu.Unlock()
		return m.awaitPair(w, first)
	}
	delete(t.pairs, key)
	if m.front.Failing() {
		t.mu.Unlock()
		<-m.front.Failed()
		return m.front.Err()
	}
	first.taken = true
	t.mu.Unlock()
	switch {
	case first.print.Header != w.print.Header:
		first.err = m.front.Fail(w.failure(collective.ErrMismatch, fmt.Errorf("rank %d calls %s, rank %d calls %s: %s",
			m.rank, &w.print, w.Call.Peer, &first.print, fingerprint.Differ(&first.print, &w.print))))
	case w.Call.Op == collective.Send:
		copy(first.Call.Dst.HostBytes(), w.Call.Src.HostBytes())
	default:
		copy(w.Call.Dst.HostBytes(), first.Call.Src.HostBytes())
	}
	close(first.done)
	return first.err
}

func (m *rank) awaitPair(w *wait, first *meeting) error {
	w.waitsForPeer()
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

// headerBytes is the length of the header of a message: the fingerprint, then the text of the sender's call.
const headerBytes = 256

// exchangeFar sends to, or receives from, a rank of another process: one message with a header.
func (m *rank) exchangeFar(w *wait) error {
	t := m.team
	peer := t.at[w.Call.Peer]
	message := make([]byte, headerBytes+w.Count*w.Call.Type.Bytes())
	o := Operation{Op: w.Call.Op, Type: tensor.Uint8, Count: len(message), Peer: peer.process, Keep: message}
	w.waitsForPeer()
	hash := w.print.Header.Sum()
	if w.Call.Op == collective.Send {
		o.Tag, o.Src = m.local*localMax+peer.local, start(message)
		binary.NativeEndian.PutUint64(message, hash)
		copy(message[8:headerBytes], w.print.String())
		copy(message[headerBytes:], w.Call.Src.HostBytes())
		return w.outcome(w.on(t.driver.Start(o)))
	}
	o.Tag, o.Dst = peer.local*localMax+m.local, start(message)
	if err := w.on(t.driver.Start(o)); err != nil {
		if errors.Is(err, collective.ErrMismatch) {
			err = fmt.Errorf("rank %d sends more than rank %d receives, which calls %s: %w",
				w.Call.Peer, m.rank, &w.print, err)
		}
		return w.outcome(err)
	}
	if binary.NativeEndian.Uint64(message) != hash {
		theirs, _, _ := bytes.Cut(message[8:headerBytes], []byte{0})
		return w.failure(collective.ErrMismatch, fmt.Errorf("rank %d calls %s, rank %d calls %s",
			w.Call.Peer, theirs, m.rank, &w.print))
	}
	copy(w.Call.Dst.HostBytes(), message[headerBytes:])
	return nil
}
