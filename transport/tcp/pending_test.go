package tcp

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// TestOrderOfPending: what arrives while an endpoint is created does not overtake what arrived before.
func TestOrderOfPending(t *testing.T) {
	ends := twoEnds(t)
	w := ends[0].group.world
	for id := uint64(1); id <= 200; id++ {
		for range pendingMax - 1 { // of this rank itself: they only take time
			w.messages = append(w.messages, pendingMessage{message{kind: msgClosed, group: id}, 0})
		}
		w.receive(&message{kind: msgFailed, group: id, from: 1, to: 1, text: []byte("why")}, 1)
		var later sync.WaitGroup
		later.Go(func() {
			for {
				w.mu.Lock()
				created := w.groups[id] != nil
				w.mu.Unlock()
				if created {
					break
				}
			}
			w.receive(&message{kind: msgClosed, group: id, from: 1}, 1)
		})
		e, err := w.take(id, []int{0, 1}, 0)
		if err != nil {
			t.Fatal(err)
		}
		later.Wait()
		if gone := e.peers[1].state.Load().gone; !errors.As(gone, new(*transport.Failure)) {
			t.Errorf("group %d: rank 1 is down because of %v, want its failure, which it sent first", id, gone)
		}
		e.Close()
	}
}

// TestPendingOfOtherGroups: the failures of groups that have no rank here do not evict what an endpoint needs that is
// created later.
func TestPendingOfOtherGroups(t *testing.T) {
	ends := twoEnds(t)
	w := ends[0].group.world
	const id = 9
	w.receive(&message{kind: msgClosed, group: id, from: 1}, 1)
	for other := uint64(100); other < 100+pendingMax; other++ {
		for range 2 { // by two processes
			w.receive(&message{kind: msgFailed, group: other, from: 1, to: 1}, 1)
		}
	}
	if n := len(w.failures); n != pendingMax {
		t.Errorf("%d failures are kept, want one for each of %d groups", n, pendingMax)
	}
	e, err := w.take(id, []int{0, 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if gone := e.peers[1].state.Load().gone; !errors.Is(gone, transport.ErrClosed) {
		t.Errorf("the state of rank 1 is %v, want %v", gone, transport.ErrClosed)
	}
}

// TestQueryBeforeTaken: a query for a rank whose endpoint does not exist yet is answered, also if another rank of its
// process has one: without an answer, the rank would count as one that does not respond.
func TestQueryBeforeTaken(t *testing.T) {
	ends := openedPair(t, [][]int{{0, 1}, {2}}, [2]Config{})
	all := []int{0, 1, 2}
	taken, err := ends[0].Split(1, all)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	asks, err := ends[2].Split(1, all)
	if err != nil {
		t.Fatal(err)
	}
	defer asks.Close()
	e, answer := asks.(*endpoint), make(chan []byte, 1)
	e.mu.Lock()
	e.queries[1] = answer
	e.mu.Unlock()
	e.send(&message{kind: msgAsk, from: 2, to: 1, tag: 1}, 0)
	select {
	case text := <-answer:
		if text != nil {
			t.Errorf("the answer is %q", text)
		}
	case <-time.After(10 * time.Second):
		t.Error("no answer")
	}
}

// suspendable is a port that accepts nothing while it is suspended; the kernel does.
type suspendable struct {
	net.Listener

	mu sync.Mutex // held while it is suspended
}

func (s *suspendable) Accept() (net.Conn, error) {
	c, err := s.Listener.Accept()
	s.mu.Lock()
	defer s.mu.Unlock()
	return c, err
}

// TestSuspendedPeer: a process that is suspended for longer than a handshake may take is not lost, when a rank first
// needs its data connection meanwhile.
func TestSuspendedPeer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := &suspendable{Listener: l}
	var dials atomic.Int64
	dials.Store(-1 << 30) // those that open the group do not count
	fourth := make(chan struct{})
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		if dials.Add(1) == 4 {
			close(fourth)
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	ends := openedPair(t, [][]int{{0}, {1}}, [2]Config{
		{Listener: port, Authenticate: authenticates},
		{Authenticate: authenticates, Handshake: 200 * time.Millisecond, Dial: dial},
	})
	dials.Store(0)
	port.mu.Lock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var exchanges sync.WaitGroup
	for rank, e := range ends {
		exchanges.Go(func() {
			in := make([]byte, 1)
			err := e.Exchange(ctx, 1-rank, transport.Frame{Data: []byte{byte(rank)}}, 1-rank, in)
			if err != nil || int(in[0]) != 1-rank {
				t.Errorf("rank %d: got %v, %v", rank, in, err)
				cancel()
			}
		})
	}
	select {
	case <-fourth: // three handshakes have timed out
	case <-time.After(time.Minute):
		t.Errorf("%d attempts to connect", dials.Load())
	}
	port.mu.Unlock()
	exchanges.Wait()
}

// authenticates authenticates: the acceptor sends a byte, which the dialer returns.
func authenticates(conn net.Conn, dialed bool, _ []byte) error {
	b := []byte{1}
	if !dialed {
		if _, err := conn.Write(b); err != nil {
			return err
		}
	}
	if _, err := conn.Read(b); err != nil {
		return err
	}
	if dialed {
		_, err := conn.Write(b)
		return err
	}
	return nil
}

// openedPair returns the ranks of two processes, which are closed when the test ends.
func openedPair(t *testing.T, local [][]int, cfg [2]Config) []*endpoint {
	t.Helper()
	var nodes []*Node
	var addrs []string
	for i := range cfg {
		cfg[i].Job = strings.ToLower(t.Name())
		n, err := Listen(cfg[i])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		nodes = append(nodes, n)
		for range local[i] {
			addrs = append(addrs, n.Addr())
		}
	}
	ends := make([]*endpoint, len(addrs))
	var opening sync.WaitGroup
	for i, n := range nodes {
		opening.Go(func() {
			all, err := n.Group(t.Context(), GroupConfig{Addrs: addrs, Local: local[i]})
			if err != nil {
				t.Error(err)
				return
			}
			for k, e := range all {
				ends[local[i][k]] = e.(*endpoint)
			}
		})
	}
	opening.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return ends
}
