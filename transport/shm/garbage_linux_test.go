package shm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// These tests check that data written by a peer causes an error at worst.

func FuzzText(f *testing.F) {
	f.Add([]byte{3, 0, 2, 1, 'a', 'b', 'c', 'x', 'y', 7})
	f.Add(bytes.Repeat([]byte{0xff}, slotTextBytes))
	f.Fuzz(func(t *testing.T, data []byte) {
		var b [slotTextBytes]byte
		copy(b[:], data)
		name, algorithm, shape, err := decodeText(&b, nil)
		if err != nil {
			return
		}
		var again [slotTextBytes]byte
		encodeText(&again, string(name), string(algorithm), shape)
		name2, algorithm2, shape2, err := decodeText(&again, nil)
		if err != nil || !bytes.Equal(name, name2) || !bytes.Equal(algorithm, algorithm2) || !slices.Equal(shape, shape2) {
			t.Errorf("%q, %q, %v became %q, %q, %v, %v", name, algorithm, shape, name2, algorithm2, shape2, err)
		}
	})
}

func TestLongText(t *testing.T) {
	var b [slotTextBytes]byte
	long, shape := strings.Repeat("n", 5000), make([]int, 100)
	encodeText(&b, long, long, shape)
	name, algorithm, dims, err := decodeText(&b, nil)
	if err != nil || len(name) != nameMax || len(algorithm) != algorithmMax || len(dims) != dimsMax {
		t.Errorf("%d, %d, %d of what is too long, %v; want %d, %d, %d", len(name), len(algorithm), len(dims), err, nameMax,
			algorithmMax, dimsMax)
	}
}

// two opens a group of two ranks.
func two(t testing.TB) (a, b *endpoint) {
	ends, err := Open(context.Background(), Config{Name: t.Name(), Size: 2, Ranks: []int{0, 1}, ArenaBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ends[0].Close(); ends[1].Close() })
	return ends[0].(*endpoint), ends[1].(*endpoint)
}

// TestRegionPages checks that the region of each group can be mapped by itself, whatever the system's pages are.
func TestRegionPages(t *testing.T) {
	for ranks := 1; ranks <= 100; ranks++ {
		if bytes := layoutOf(ranks).bytes; tableBytes%pageMax != 0 || bytes%pageMax != 0 {
			t.Fatalf("a region of %d ranks has %d bytes, after a table of %d: want multiples of %d", ranks, bytes, tableBytes,
				pageMax)
		}
	}
}

// TestMemoryAfterClose checks that a rank whose endpoint is closed before it publishes a call does not write into the
// slot of the call before, which peers may still read.
func TestMemoryAfterClose(t *testing.T) {
	a, b := two(t)
	for _, e := range []*endpoint{a, b} {
		e.Publish(&transport.Slot{})
		copy(e.Inline(e.rank), "data")
		copy(e.StagingBuffer(e.rank), "data")
	}
	if err := errors.Join(a.Signal(0), b.Signal(0)); err != nil {
		t.Fatal(err)
	}
	a.Close()
	a.Publish(&transport.Slot{})
	copy(a.Inline(0), "later")
	copy(a.StagingBuffer(0), "later")
	if err := a.Signal(0); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("Signal after Close: %v", err)
	}
	for _, got := range [][]byte{b.Inline(0)[:5], b.StagingBuffer(0)[:5]} {
		if string(got) != "data\x00" {
			t.Errorf("after Close the rank has written %q, want %q as before", got, "data")
		}
	}
}

func FuzzSlot(f *testing.F) {
	f.Add(make([]byte, 200))
	f.Add(bytes.Repeat([]byte{1}, 200))
	f.Add(bytes.Repeat([]byte{0xff}, int(unsafe.Sizeof(slot{}))))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, b := two(t)
		a.Publish(&transport.Slot{})
		b.Publish(&transport.Slot{})
		if err := errors.Join(a.Signal(0), b.Signal(0)); err != nil {
			t.Fatal(err)
		}
		raw := (*[unsafe.Sizeof(slot{})]byte)(unsafe.Pointer(&b.mine.slots[1]))
		copy(raw[8:], data) // behind the progress
		if err := a.Await(context.Background(), -1, 0); err != nil {
			var down *transport.PeerDown
			if !errors.As(err, &down) || down.Rank != 1 {
				t.Errorf("%v, want a PeerDown of rank 1", err)
			}
			return
		}
		s := a.Peer(1)
		for _, m := range []tensor.Memory{s.Src, s.Dst} {
			if m.Bytes < 0 {
				t.Errorf("memory of %d bytes", m.Bytes)
			}
			if m.Ptr != nil {
				m.HostBytes()[0]++
				m.HostBytes()[m.Bytes-1]++
			}
		}
	})
}

// TestGarbageInPipes fills all that belongs to a pipe with garbage while frames are exchanged.
func TestGarbageInPipes(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	a, _ := two(t)
	a.Inspect(func(int, transport.Header) error { return nil })
	data := make([]byte, 3*ringMax)
	naps(a, 100*time.Microsecond) // so that it waits in both ways
	for range 300 {
		done := make(chan struct{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(random.IntN(2000))*time.Microsecond)
		go func() {
			defer close(done)
			if err := a.Exchange(ctx, 1, transport.Frame{Data: data}, 1, data); err == nil {
				t.Logf("a frame was accepted (seed %d)", seed) // possible: the garbage may be valid
			}
		}()
		value := func() uint64 {
			return []uint64{random.Uint64(), uint64(random.IntN(8)), uint64(random.IntN(1 << 20))}[random.IntN(3)]
		}
		for range random.IntN(20) {
			for _, p := range []*pipe{a.outgoing[1].pipe, a.incoming[1].pipe} {
				p.sent.Store(value())
				p.got.Store(value())
				p.state.Store(value())
			}
			time.Sleep(10 * time.Microsecond)
		}
		<-done
		cancel()
	}
}

// TestReplacedFrame checks that a frame that its sender offers again while it is received is not accepted: its bytes
// may be of two frames.
func TestReplacedFrame(t *testing.T) {
	a, b := two(t)
	data := make([]byte, 2*ringMax)
	done := make(chan error, 1)
	go func() { done <- b.Exchange(context.Background(), -1, transport.Frame{}, 0, make([]byte, len(data))) }()
	p := &a.outgoing[1]
	if err := a.providePipe(p, 0, 1, pipeWhole); err != nil {
		t.Fatal(err)
	}
	a.x = exchange{to: 1, from: -1, out: data}
	a.offer(&transport.Frame{Data: data})
	for p.state.Load()%pipeStates != pipeClaimed {
		time.Sleep(time.Millisecond)
	}
	p.state.Store(p.frame*pipeStates + pipeOffered)
	for a.x.put < len(data) {
		a.x.put = a.fill(p, data, a.x.put)
		a.poke(1)
	}
	var down *transport.PeerDown
	if err := <-done; !errors.As(err, &down) || down.Rank != 0 {
		t.Errorf("the exchange ended with %v, want a PeerDown of rank 0", err)
	}
}

// FuzzMessage checks the messages of the handshake: an accepted hello or join reply is valid.
func FuzzMessage(f *testing.F) {
	own := Config{Job: "job", Size: 4, Ranks: []int{0}}
	foreign := own.hello()
	foreign.Ranks = []int{7} // not of 4
	for _, m := range []any{own.hello(), foreign, helloReply{"no"}, joinReply{
		Processes: []member{{1, []int{0}}, {2, []int{1, 2, 3}}},
		You:       1,
	}} {
		var b bytes.Buffer
		text, err := json.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		b.Write([]byte{byte(len(text)), byte(len(text) >> 8), 0, 0})
		b.Write(text)
		f.Add(b.Bytes())
	}
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, '{'})
	f.Fuzz(func(t *testing.T, data []byte) {
		mine := own.hello()
		var h hello
		if _, err := receive(bytes.NewReader(data), &h); err == nil && mine.differ(&h) == "" &&
			checkRanks(h.Ranks, 4) != nil {
			t.Errorf("%+v was accepted", h)
		}
		joining := own
		joining.Ranks = []int{1, 2, 3}
		var reply joinReply
		if _, err := receive(bytes.NewReader(data), &reply); err == nil && reply.check(&joining) == nil &&
			len(reply.Processes) != 2 {
			t.Errorf("%+v was accepted", reply)
		}
		var refusal helloReply
		receive(bytes.NewReader(data), &refusal)
	})
}

// TestWrongFile checks that a file that its sender could truncate is not mapped.
func TestWrongFile(t *testing.T) {
	plain, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if err := plain.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	if mem, err := mapArena(plain); err == nil || mem != nil {
		t.Errorf("a file that can be truncated was mapped: %v", err)
	}
}

// TestArena allocates and frees buffers at random, and checks that no two buffers overlap, that all are zero, and that
// one hole remains at the end.
func TestArena(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	a, err := newArena(32 << 20)
	if err != nil {
		t.Fatal(err)
	}
	var live []tensor.Memory
	for range 2000 {
		if random.IntN(5) > 1 {
			m, err := a.allocate(1 + random.IntN(1<<random.IntN(23)))
			if err != nil {
				if len(live) == 0 {
					t.Fatalf("%v, though nothing is allocated (seed %d)", err, seed)
				}
				continue
			}
			b := m.HostBytes()
			if at := uintptr(m.Ptr); m.Bytes >= hugePage && at%hugePage != 0 {
				t.Fatalf("%d bytes lie at %#x, where no huge page fits (seed %d)", m.Bytes, at, seed)
			}
			if i := slices.IndexFunc(b, func(x byte) bool { return x != 0 }); i >= 0 {
				t.Fatalf("byte %d of %d is %d (seed %d)", i, len(b), b[i], seed)
			}
			for i := 0; i < len(b); i += 512 {
				b[i] = 1
			}
			b[len(b)-1] = 1
			live = append(live, m)
		} else if len(live) > 0 {
			i := random.IntN(len(live))
			live[i].Owner.Release()
			live = slices.Delete(live, i, i+1)
		}
	}
	for _, m := range live {
		m.Owner.Release()
	}
	if len(a.free) != 1 || a.free[0] != (extent{0, 32 << 20}) {
		t.Errorf("the holes at the end are %v (seed %d)", a.free, seed)
	}
	last, err := a.allocate(100)
	if err != nil {
		t.Fatal(err)
	}
	a.close()
	last.HostBytes()[99] = 1 // stays until it is released
	last.Owner.Release()
	if a.mem != nil {
		t.Error("the arena is still mapped")
	}
}
