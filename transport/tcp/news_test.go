package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/overlay"
	"github.com/lockstep-ml/lockstep/transport"
)

// job is a group of processes that are linked with few others, all in this process.
type job struct {
	*testing.T
	nodes []*Node
	ports []*accepted
	ends  []*endpoint
	graph overlay.Graph
}

// few returns a group of n processes with one rank each, which are linked with few others.
func few(t *testing.T, n int) *job {
	t.Helper()
	j := &job{T: t, graph: overlay.New(n, 0), ends: make([]*endpoint, n)}
	addrs := make([]string, n)
	for i := range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := &accepted{Listener: l}
		node, err := Listen(Config{Job: "news", Listener: port, HalfOpen: 4 * n, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { node.Close() })
		node.SetMeshMax(0)
		j.nodes, j.ports, addrs[i] = append(j.nodes, node), append(j.ports, port), node.Addr()
	}
	var opening sync.WaitGroup
	for i, node := range j.nodes {
		opening.Go(func() {
			ends, err := node.Group(t.Context(), GroupConfig{Addrs: addrs, Local: []int{i}})
			if err != nil {
				t.Error(err)
				return
			}
			j.ends[i] = ends[0].(*endpoint)
		})
	}
	opening.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return j
}

// accepted is a listener that knows the connections that it has accepted.
type accepted struct {
	net.Listener

	mu    sync.Mutex
	conns []net.Conn
}

func (a *accepted) Accept() (net.Conn, error) {
	c, err := a.Listener.Accept()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		a.conns = append(a.conns, c)
	}
	return c, err
}

// kill ends a process without a message: its port and its connections close.
func (j *job) kill(rank int) {
	w := j.ends[rank].group.world
	w.mu.Lock()
	links := []*link{}
	for _, l := range w.links {
		links = append(links, l)
	}
	for _, o := range w.opening {
		if o.accepted != nil {
			links = append(links, o.accepted)
		}
	}
	for _, l := range links {
		l.mu.Lock()
		l.closed = true // its end is not reported
		l.mu.Unlock()
		l.a.raw.Close()
	}
	j.ports[rank].Close()
	j.ports[rank].mu.Lock()
	for _, c := range j.ports[rank].conns {
		c.Close()
	}
	j.ports[rank].mu.Unlock()
	w.closed = true
	w.mu.Unlock()
	w.end()
	for i := range j.ends[rank].peers {
		if p := &j.ends[rank].peers[i]; p.up.Load() {
			p.stream.w.close()
		}
	}
}

// sent returns the number of messages about failures that all processes have sent.
func (j *job) sent() (n int) {
	for _, e := range j.ends {
		n += int(e.group.world.news.Load())
	}
	return n
}

// settled returns the same, once it is at least a number and changes no more.
func (j *job) settled(least int) int {
	for begin := time.Now(); ; {
		before := j.sent()
		time.Sleep(20 * time.Millisecond)
		if now := j.sent(); now == before && (now >= least || time.Since(begin) > 10*time.Second) {
			return now
		}
	}
}

// next returns the next rank that an endpoint reports as down.
func (j *job) next(e transport.Endpoint) transport.PeerDown {
	j.Helper()
	select {
	case d := <-e.Down():
		return d
	case <-time.After(time.Minute):
		j.Fatalf("rank %d was notified of nothing", e.Rank())
		return transport.PeerDown{}
	}
}

// quiet reports an error if an endpoint reports a rank as down.
func (j *job) quiet(e transport.Endpoint) {
	j.Helper()
	select {
	case d := <-e.Down():
		j.Errorf("rank %d was also notified that rank %d is down: %v", e.Rank(), d.Rank, d.Err)
	default:
	}
}

// passed returns how many messages carry the news of the loss of a process at most: one for each link between two
// processes in each direction, if the receiver is not linked with the lost one.
func (j *job) passed(lost int) (most int) {
	for p := range j.ends {
		for _, q := range j.graph.Neighbours(p) {
			if p != lost && q != lost && !j.graph.Linked(q, lost) {
				most++
			}
		}
	}
	return most
}

// TestNews: all processes learn of the loss of one, whether or not they are linked with it, by few messages.
func TestNews(t *testing.T) {
	const n, lost = 48, 21
	j := few(t, n)
	j.kill(lost)
	for _, e := range j.ends {
		if e.rank == lost {
			continue
		}
		d := j.next(e)
		if text := d.Err.Error(); d.Rank != lost || !strings.HasPrefix(text, errLost.Error()) &&
			!strings.HasPrefix(text, "its connection was reset") { // the latter if it had not read all messages
			t.Errorf("rank %d was notified that rank %d is down: %v", e.rank, d.Rank, d.Err)
		}
		if by := "(reported by rank "; strings.Contains(d.Err.Error(), by) == j.graph.Linked(e.rank, lost) {
			t.Errorf("rank %d got %v, want %q if it is not linked with rank %d", e.rank, d.Err, by, lost)
		}
		// A group that is created later knows it too.
		sub, err := e.Split(5, []int{lost, e.rank})
		if err != nil {
			t.Fatal(err)
		}
		if d := j.next(sub); d.Rank != 0 {
			t.Errorf("rank %d of a later group is down, want rank 0", d.Rank)
		}
		sub.Close()
	}
	most := j.passed(lost)
	least := most - (n - 1 - len(j.graph.Neighbours(lost))) // a process does not send it back
	if sent := j.settled(least); sent < least || sent > most {
		t.Errorf("%d messages, want %d to %d", sent, least, most)
	} else {
		t.Logf("%d messages between %d processes, of %d to %d; each to all others would be %d", sent, n, least, most,
			(n-1)*(n-2))
	}
	for _, e := range j.ends {
		j.quiet(e)
	}
}

// TestNewsOfMany: processes that are lost at once, while others exchange frames and open links, are reported to all
// others, and no other process is.
func TestNewsOfMany(t *testing.T) {
	for range attempts() {
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		n := 20 + random.IntN(30)
		j := few(t, n)
		var busy sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for _, e := range j.ends {
			peer := random.IntN(n)
			if e.rank == peer {
				continue
			}
			busy.Go(func() { e.Ask(peer, 0) })
			busy.Go(func() { e.Exchange(ctx, peer, transport.Frame{Data: []byte("x")}, -1, nil) })
		}
		lost := j.victims(random)
		var killing sync.WaitGroup
		for r := range lost {
			killing.Go(func() { j.kill(r) })
		}
		killing.Wait()
		for _, e := range j.ends {
			if lost[e.rank] {
				continue
			}
			reported := map[int]bool{}
			for range lost {
				d := j.next(e)
				if reported[d.Rank] || !lost[d.Rank] || d.Err == transport.ErrClosed {
					t.Errorf("seed %d: rank %d was notified that rank %d is down: %v", seed, e.rank, d.Rank, d.Err)
				}
				reported[d.Rank] = true
			}
			j.quiet(e)
		}
		cancel()
		busy.Wait()
		if t.Failed() {
			return
		}
		for _, node := range j.nodes {
			node.Close()
		}
	}
}

func attempts() int {
	if testing.Short() {
		return 3
	}
	return 15
}

// victims returns up to six ranks without which all others are still connected with each other.
func (j *job) victims(random *rand.Rand) map[int]bool {
	n := len(j.ends)
	for {
		lost := map[int]bool{}
		for range 1 + random.IntN(6) {
			lost[random.IntN(n)] = true
		}
		reached := map[int]bool{}
		for r := range n {
			if !lost[r] {
				j.reach(r, lost, reached)
				break
			}
		}
		if len(reached)+len(lost) == n {
			return lost
		}
	}
}

func (j *job) reach(from int, lost, reached map[int]bool) {
	reached[from] = true
	for _, q := range j.graph.Neighbours(from) {
		if !lost[q] && !reached[q] {
			j.reach(q, lost, reached)
		}
	}
}

// TestNewsGoAround: a process that is stopped does not stop the news.
func TestNewsGoAround(t *testing.T) {
	const n, lost, stopped = 24, 0, 5
	j := few(t, n)
	w := j.ends[stopped].group.world
	w.mu.Lock() // so it handles no message
	j.kill(lost)
	for _, e := range j.ends {
		if e.rank != lost && e.rank != stopped {
			if d := j.next(e); d.Rank != lost {
				t.Errorf("rank %d was notified of rank %d", e.rank, d.Rank)
			}
		}
	}
	w.mu.Unlock()
	if d := j.next(j.ends[stopped]); d.Rank != lost {
		t.Errorf("the stopped process was notified of rank %d", d.Rank)
	}
}

// TestNewsOfFailure: the members of a group that fails are all notified, with the text, also through processes outside
// of it. If many fail, each other one is notified of one at least, by no more messages than one in each direction of a
// link.
func TestNewsOfFailure(t *testing.T) {
	const n = 32
	j := few(t, n)
	var members []int
	for r := 0; r < n; r += 3 {
		members = append(members, r)
	}
	split := func(id uint64) (subs []transport.Endpoint) {
		for _, r := range members {
			e, err := j.ends[r].Split(id, members)
			if err != nil {
				t.Fatal(err)
			}
			subs = append(subs, e)
		}
		return subs
	}
	check := func(e transport.Endpoint, text string) {
		t.Helper()
		d := j.next(e)
		if f := (*transport.Failure)(nil); !errors.As(d.Err, &f) || !strings.HasPrefix(string(f.Reason), text) {
			t.Errorf("rank %d was notified of rank %d: %v", e.Rank(), d.Rank, d.Err)
		}
	}
	most := 0
	for r := range n {
		most += len(j.graph.Neighbours(r))
	}
	subs := split(7)
	subs[4].Fail([]byte("no more oil"))
	for r, e := range subs {
		if r != 4 {
			check(e, "no more oil")
		}
	}
	sent := j.settled(n - 1)
	for _, e := range subs {
		j.quiet(e)
	}
	if sent > most || sent < n-1 {
		t.Errorf("%d messages, want %d to %d", sent, n-1, most)
	}

	before := j.sent()
	others := split(8)
	var failing sync.WaitGroup
	for r, e := range others {
		if r%3 != 0 {
			failing.Go(func() { e.Fail(fmt.Appendf(nil, "rank %d", r)) })
		}
	}
	failing.Wait()
	for r, e := range others {
		if r%3 == 0 {
			check(e, "rank ")
		}
	}
	time.Sleep(20 * time.Millisecond)
	if sent := j.sent() - before; sent > most {
		t.Errorf("%d messages, want at most %d", sent, most)
	}

	// A group that is created after its failure was reported.
	late := members[2]
	first, err := j.ends[members[0]].Split(9, []int{members[0], late})
	if err != nil {
		t.Fatal(err)
	}
	first.Fail([]byte("early"))
	time.Sleep(20 * time.Millisecond)
	second, err := j.ends[late].Split(9, []int{members[0], late})
	if err != nil {
		t.Fatal(err)
	}
	check(second, "early")
	for _, e := range j.ends { // the whole group has not failed
		j.quiet(e)
	}
}

// TestSecondFailure: a rank that fails after its group has failed is down for those that need it, before and after.
func TestSecondFailure(t *testing.T) {
	j := few(t, 16)
	j.ends[3].Fail([]byte("first"))
	for _, e := range j.ends {
		if e.rank != 3 {
			j.next(e)
		}
	}
	sends := func(from, to int) error {
		return j.ends[from].Exchange(t.Context(), to, transport.Frame{Data: []byte("x")}, -1, nil)
	}
	if err := sends(14, 8); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- j.ends[14].Exchange(t.Context(), -1, transport.Frame{}, 8, make([]byte, 1)) }()
	time.Sleep(time.Millisecond)
	j.ends[8].Fail([]byte("second"))
	for name, err := range map[string]error{
		"one that waits":             <-waiting,
		"a higher one that did not":  j.ends[15].Exchange(t.Context(), -1, transport.Frame{}, 8, make([]byte, 1)),
		"a lower one that did not":   j.ends[5].Exchange(t.Context(), -1, transport.Frame{}, 8, make([]byte, 1)),
		"a neighbour that did not":   j.ends[9].Exchange(t.Context(), -1, transport.Frame{}, 8, make([]byte, 1)),
		"one that waits for another": j.ends[5].Exchange(t.Context(), -1, transport.Frame{}, 3, make([]byte, 1)),
	} {
		if f := (*transport.Failure)(nil); !errors.As(err, &f) {
			t.Errorf("%s got %v, want the failure", name, err)
		}
	}
}

// TestCloseUnlinked: a rank that needs one that has closed its endpoint, to which it had no link, gets ErrClosed: also
// if the process of that one has left the group or ended.
func TestCloseUnlinked(t *testing.T) {
	const n, closed = 24, 12
	j := few(t, n)
	for i, c := range []struct {
		name  string
		close func()
		ranks []int
	}{
		{"an endpoint", func() {}, []int{2, 22}},
		{"all endpoints", func() { j.ends[closed].Close() }, []int{3, 21}},
		{"the process", func() { j.nodes[closed].Close() }, []int{6, 18}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ranks := append([]int{closed}, c.ranks...)
			if i < 2 {
				sub, err := j.ends[closed].Split(uint64(40+i), ranks)
				if err != nil {
					t.Fatal(err)
				}
				sub.Close()
			}
			c.close()
			for _, r := range c.ranks {
				if j.graph.Linked(r, closed) {
					t.Fatalf("rank %d is linked", r)
				}
				e, err := j.ends[r].Split(uint64(40+i), ranks)
				if err != nil {
					t.Fatal(err)
				}
				defer e.Close()
				began := time.Now()
				err = e.Exchange(t.Context(), -1, transport.Frame{}, 0, make([]byte, 1))
				if down := (*transport.PeerDown)(nil); !errors.Is(err, transport.ErrClosed) || !errors.As(err, &down) {
					t.Errorf("rank %d: %v, want that rank %d has closed its end", r, err, closed)
				}
				t.Logf("rank %d, after %v: %v", r, time.Since(began).Round(time.Millisecond), err)
				if e.Ask(0, 0) != nil {
					t.Errorf("a closed endpoint has answered")
				}
			}
		})
	}
}

// TestLeave: a process that leaves has closed its endpoints. It is not lost, also in groups that it left before it was
// linked with this process.
func TestLeave(t *testing.T) {
	const n, leaves, stays = 24, 12, 2
	j := few(t, n)
	if j.graph.Linked(leaves, stays) {
		t.Fatal("they are linked")
	}
	var subs [2]transport.Endpoint
	for i, r := range []int{leaves, stays} {
		e, err := j.ends[r].Split(5, []int{leaves, stays, 22})
		if err != nil {
			t.Fatal(err)
		}
		subs[i] = e
	}
	subs[0].Close()
	if err := j.ends[leaves].Exchange(t.Context(), stays, transport.Frame{}, -1, nil); err != nil {
		t.Fatal(err)
	}
	if err := j.ends[stays].Exchange(t.Context(), -1, transport.Frame{}, leaves, nil); err != nil {
		t.Fatal(err)
	}
	for !j.linked(stays, leaves) { // the frame may arrive before the link is open
		time.Sleep(time.Millisecond)
	}
	j.ends[leaves].Close()
	for _, e := range []transport.Endpoint{j.ends[stays], subs[1]} {
		if d := j.next(e); !errors.Is(d.Err, transport.ErrClosed) {
			t.Errorf("rank %d of a group of %d: %v, want that it has closed its endpoint", d.Rank, e.Size(), d.Err)
		}
	}
}

// linked reports whether the link of a process with another one is open.
func (j *job) linked(process, with int) bool {
	w := j.ends[process].group.world
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.links[with] != nil
}

// TestConnectWhileClosing: a rank that requests a connection from one that is closing its endpoint, and has announced
// that to others, does not wait for it.
func TestConnectWhileClosing(t *testing.T) {
	const n, closing, waits = 24, 12, 2
	j := few(t, n)
	e := j.ends[closing]
	e.group.world.announce(e)   // the state of Close between its announcement and its end
	defer e.closed.Store(false) // so that it is closed completely
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err := j.ends[waits].Exchange(ctx, -1, transport.Frame{}, closing, nil)
	if down := (*transport.PeerDown)(nil); !errors.As(err, &down) || !errors.Is(err, transport.ErrClosed) {
		t.Errorf("got %v, want that rank %d has closed its endpoint", err, closing)
	}
}

// TestRefusalOvertakes: a refused data connection does not hide that the peer has failed, although the refusal may
// overtake that message on the control connection.
func TestRefusalOvertakes(t *testing.T) {
	quiet := Config{Logger: slog.New(slog.DiscardHandler)}
	ends := openedPair(t, [][]int{{0}, {1}}, [2]Config{quiet, quiet})
	w := ends[1].group.world
	w.mu.Lock() // so it handles no message
	ends[0].Fail([]byte("why"))
	var closing sync.WaitGroup
	closing.Go(func() { ends[0].Close() })
	for !ends[0].closed.Load() {
		time.Sleep(time.Millisecond)
	}
	refused := make(chan struct{})
	go func() {
		ends[1].dial(0)
		close(refused)
	}()
	for begin := time.Now(); time.Since(begin) < time.Minute && !ends[1].peers[0].state.Load().broken; {
		time.Sleep(time.Millisecond)
	}
	if gone := ends[1].peers[0].state.Load().gone; gone != nil {
		t.Errorf("rank 0 is down because of %v, before its messages were handled", gone)
	}
	w.mu.Unlock()
	closing.Wait()
	<-refused
	if d := <-ends[1].Down(); !errors.As(d.Err, new(*transport.Failure)) {
		t.Errorf("rank 0 is down because of %v, want its failure", d.Err)
	}
}

// TestNeededLater: a rank that has closed after a failure is reported with it, also to a process that opens a control
// connection only then.
func TestNeededLater(t *testing.T) {
	const n, leaves = 24, 12
	for _, needs := range []int{2, 18} { // the first requests a data connection, the second dials
		j := few(t, n)
		members := []int{min(needs, leaves), max(needs, leaves)}
		subs := map[int]transport.Endpoint{}
		for _, r := range members {
			e, err := j.ends[r].Split(5, members)
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			subs[r] = e
		}
		j.ends[leaves].group.world.firstFailure(5) // so it is not the first, and Fail sends nothing
		subs[leaves].Fail([]byte("why"))
		subs[leaves].Close()
		err := subs[needs].Exchange(t.Context(), -1, transport.Frame{}, 1-subs[needs].Rank(), nil)
		if !errors.As(err, new(*transport.Failure)) {
			t.Errorf("process %d: %v, want the failure", needs, err)
		}
	}
}

// TestNeededAfterLeave: a process that refuses a connection because it has left is reported once the news of a failure
// have had time to arrive.
func TestNeededAfterLeave(t *testing.T) {
	const n, leaves = 24, 12
	j := few(t, n)
	j.ends[leaves].Close()
	for _, needs := range []int{2, 18} { // the first requests a data connection, the second dials
		began := time.Now()
		err := j.ends[needs].Exchange(t.Context(), -1, transport.Frame{}, leaves, nil)
		if spent := time.Since(began); !errors.Is(err, transport.ErrClosed) || spent < brokenGrace {
			t.Errorf("process %d: %v after %v, want %v after %v", needs, err, spent, transport.ErrClosed, brokenGrace)
		}
	}
}

// TestNeededLink: a link that this process needs is dialed if the connection of the other process ends before it is
// used.
func TestNeededLink(t *testing.T) {
	const n, dialer, acceptor = 24, 12, 2
	j := few(t, n)
	w, other := j.ends[acceptor].group.world, j.ends[dialer].group.world
	a, err := other.node.dial(t.Context(), other.target(acceptor), other.hello(acceptor), forever)
	if err != nil {
		t.Fatal(err)
	}
	w.post(dialer, nil) // the accepted connection counts
	a.raw.Close()
	for linked := false; !linked; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		linked = w.links[dialer] != nil
		opening := w.opening[dialer] != nil
		w.mu.Unlock()
		if !linked && !opening {
			t.Fatal("the link was given up")
		}
	}
}

// TestCrossing: all ranks exchange with all others at once. Each pair of processes keeps one link, and no process is
// reported as lost.
func TestCrossing(t *testing.T) {
	const n = 20
	j := few(t, n)
	for _, e := range j.ends {
		e.Answer(func(uint64) []byte { return []byte("here") })
	}
	var all sync.WaitGroup
	for _, e := range j.ends {
		all.Go(func() {
			for d := 1; d < n; d++ {
				to, from := (e.rank+d)%n, (e.rank+n-d)%n
				in := make([]byte, 1)
				if err := e.Exchange(t.Context(), to, transport.Frame{Data: []byte{byte(e.rank)}}, from, in); err != nil ||
					int(in[0]) != from {
					t.Errorf("rank %d got %v from %d: %v", e.rank, in, from, err)
					return
				}
				if d%3 == 0 && string(e.Ask(to, 0)) != "here" {
					t.Errorf("rank %d got no answer of %d", e.rank, to)
				}
			}
		})
	}
	all.Wait()
	for _, e := range j.ends {
		j.quiet(e)
		w := e.group.world
		w.mu.Lock()
		if len(w.links)+len(w.opening) != n-1 {
			t.Errorf("process %d has %d links and opens %d, want %d", e.rank, len(w.links), len(w.opening), n-1)
		}
		w.mu.Unlock()
	}
}

// TestJoinMissing: if a process does not join, all others get an error soon after the first finds out. If it is absent
// at the deadline, its neighbours get one that names it; if it refuses them, those that it refuses first.
func TestJoinMissing(t *testing.T) {
	const n, absent = 20, 8
	graph := overlay.New(n, 0)
	var nodes []*Node
	addrs := make([]string, n)
	for i := range n {
		node, err := Listen(Config{Job: "news", HalfOpen: n, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		defer node.Close()
		node.SetMeshMax(0)
		nodes, addrs[i] = append(nodes, node), node.Addr()
	}
	for _, c := range []struct {
		name string
		id   uint64
		act  func() // of the absent one
	}{
		{"absent", 1, func() {}},
		{"refusing", 2, func() {}},
		{"leaving", 3, func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if _, err := nodes[absent].Group(ctx, GroupConfig{ID: 3, Addrs: addrs, Local: []int{absent}}); err == nil {
				t.Error("joined a group whose other members are late")
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			late := c.name == "absent"
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			addrs := slices.Clone(addrs)
			if c.name == "refusing" {
				node, err := Listen(Config{Job: "other", Logger: slog.New(slog.DiscardHandler)})
				if err != nil {
					t.Fatal(err)
				}
				defer node.Close()
				addrs[absent] = node.Addr()
			}
			var joining, members sync.WaitGroup
			var named atomic.Int32
			joining.Go(c.act)
			if late {
				joining.Go(func() { // the deadline, once the others are connected
					begin := time.Now()
					for time.Since(begin) < time.Minute && !connectedBut(nodes, absent, worldKey{0, c.id}) {
						time.Sleep(time.Millisecond)
					}
					cancel(context.DeadlineExceeded)
				})
			}
			for i, node := range nodes {
				if i == absent || c.name == "leaving" && i == absent+2 {
					continue // the last one of them is late, so the other leaves while they wait
				}
				members.Go(func() {
					_, err := node.Group(ctx, GroupConfig{ID: c.id, Addrs: addrs, Local: []int{i}})
					e := (*transport.NotConnected)(nil)
					names := errors.As(err, &e) && slices.Equal(e.Ranks, []int{absent}) &&
						strings.Contains(err.Error(), "not connected with ranks [8]")
					if e == nil || late && graph.Linked(i, absent) && !names {
						t.Errorf("rank %d: %v", i, err)
					}
					if names {
						named.Add(1)
					}
				})
			}
			members.Wait()
			if c.name == "refusing" && named.Load() == 0 {
				t.Error("no process names the one that refuses")
			}
			joining.Wait()
		})
	}
}

// connectedBut reports whether all processes but one are connected with their other neighbours.
func connectedBut(nodes []*Node, absent int, key worldKey) bool {
	for i, node := range nodes {
		if i == absent {
			continue
		}
		node.mu.Lock()
		w := node.worlds[key]
		node.mu.Unlock()
		if w == nil {
			return false
		}
		want := len(w.next)
		if w.graph.Linked(i, absent) {
			want--
		}
		w.mu.Lock()
		links := len(w.links)
		w.mu.Unlock()
		if links < want {
			return false
		}
	}
	return true
}

// TestHostileNews: news about ranks that do not exist, about the receiver, of groups that do not fit, or that have
// passed too many processes, change nothing. Any number of unknown groups needs bounded memory and is passed on once.
func TestHostileNews(t *testing.T) {
	j := few(t, 12)
	hostile := j.ends[0].group.world
	peer := j.graph.Neighbours(0)[0]
	l := hostile.links[peer]
	target := j.ends[peer].group.world
	other := 0
	for r := range j.ends {
		if r != peer && r != 0 && !j.graph.Linked(r, peer) {
			other = r
		}
	}
	for _, m := range []message{
		{kind: msgLost, from: 0, to: 12},
		{kind: msgLost, from: 0, to: 1<<32 - 1},
		{kind: msgLost, from: 1 << 31, to: uint32(other)},
		{kind: msgLost, from: 0, to: uint32(peer)},
		{kind: msgLost, from: 0, to: uint32(other), text: make([]byte, newsTextMax+1)},
		{kind: msgFailed, from: 0, to: 12},
		{kind: msgFailed, from: 0, to: 1<<32 - 1},
		{kind: msgFailed, from: 12, to: 0},
		{kind: msgFailed, from: 1<<32 - 1, to: 0},
		{kind: msgFailed, from: uint32(other), to: 0}, // of another process
		{kind: msgClosed, from: uint32(other)},
		{kind: msgClosed, from: 1<<32 - 1},
		{kind: msgConnect, from: 0, to: 1<<32 - 1},
		{kind: msgAsk, from: 0, to: 1<<32 - 1},
		{kind: msgReady},
		{kind: msgReady},
		{kind: msgOpen},
	} {
		l.send(&m)
	}
	const many = pastMax + 500
	for id := range uint64(many) {
		l.send(&message{kind: msgFailed, group: 1000 + id, tag: hopsMax, to: 0})
	}
	for id := range uint64(3) {
		l.send(&message{kind: msgFailed, group: 1000 + many - 1 - id, to: 0}) // known
	}
	l.send(&message{kind: msgAsk, from: 0, to: uint32(peer), tag: 1})
	for done := false; !done; time.Sleep(time.Millisecond) {
		target.mu.Lock()
		done = len(target.failed) > 0 && target.failed[len(target.failed)-1] == 1000+many-1
		if len(target.messages) > pendingMax || len(target.failed) > pastMax {
			t.Errorf("%d messages and %d groups are kept", len(target.messages), len(target.failed))
		}
		target.mu.Unlock()
	}
	for _, e := range j.ends {
		j.quiet(e)
	}
	if sent := target.news.Load(); sent != 0 {
		t.Errorf("the receiver has passed %d messages on", sent)
	}
	if err := j.ends[2].Exchange(t.Context(), peer, transport.Frame{Data: []byte("x")}, -1, nil); err != nil && peer != 2 {
		t.Error(err)
	}
}
