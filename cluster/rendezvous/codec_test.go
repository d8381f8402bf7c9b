package rendezvous

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// A decoder accepts what its encoder writes. No input makes it panic or allocate a claimed length.

func FuzzGreeting(f *testing.F) {
	own := clientID{1, 2, 3}.hello().Fields
	f.Add(own[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		g := listener.Hello{Service: listener.Store}
		copy(g.Fields[:], b)
		if id, err := clientOf(&g); err == nil && *id.hello() != g {
			t.Fatalf("%+v is read as %v", g, id)
		}
	})
}

func FuzzRequest(f *testing.F) {
	for _, q := range []request{{op: opGet, key: "a"}, {
		op: opSwap, id: 1, oldest: 1, revision: 7, key: "a/b",
		value: []byte("v"),
	}, {op: opDelete, key: "a", token: &Token{"job/epoch", []byte("3")}}, {
		op: opSet, key: "a", value: []byte("v"), token: &Token{"e", nil},
	}, {op: opPing}} {
		f.Add(q.encode()[4:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q request
		if err := q.decode(b); err == nil && !bytes.Equal(q.encode()[4:], b) {
			t.Fatalf("%x is read as %+v", b, q)
		}
	})
}

func (p *response) bytes() []byte { return bytes.Join(p.encode(), nil) }

func FuzzResponse(f *testing.F) {
	f.Add((&response{id: 3, revision: 9, entries: []Entry{
		{Key: "k", Value: []byte("v"), Revision: 4},
		{Key: "l", Deleted: true},
	}}).bytes()[4:])
	f.Fuzz(func(t *testing.T, b []byte) {
		var p response
		if err := p.decode(b); err != nil || p.more || len(b) > chunkBytes {
			return
		}
		if got := p.bytes()[4:]; !bytes.Equal(got, b) {
			t.Fatalf("%x is read as %+v, which is %x", b, p, got)
		}
	})
}

func FuzzLog(f *testing.F) {
	head := (&logHeader{id: 1, store: 4, revision: 2, floor: 3}).encode()
	one := encodeLogEntry(&Entry{Key: "k", Value: []byte("value"), Revision: 5})
	two := encodeLogEntry(&Entry{Key: "k", Deleted: true, Revision: 6})
	f.Add(head, append(one, two...))
	f.Fuzz(func(t *testing.T, head, tail []byte) {
		if h, err := decodeLogHeader(head); err == nil && (!bytes.Equal(h.encode()[:10], head[:10]) ||
			!bytes.Equal(h.encode()[12:44], head[12:44])) {
			t.Fatalf("%x is read as %+v", head, h)
		}
		table := newTable()
		n, err := replay(&table, tail)
		if n > len(tail) {
			t.Fatalf("%d of %d bytes are read", n, len(tail))
		}
		again := newTable()
		if m, err2 := replay(&again, tail[:n]); err == nil && (m != n || err2 != nil || !reflect.DeepEqual(table, again)) {
			t.Fatalf("what is whole, %d bytes, is read as %d bytes, %v", n, m, err2)
		}
	})
}

func FuzzRegistrationAndOutcome(f *testing.F) {
	f.Add([]byte(`{"job":"a","worker":1,"workers":2}`))
	f.Add([]byte(`{"joined":true}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := parseRegistration(b); err == nil && c.check() != nil {
			t.Fatalf("%q is an invalid registration that was accepted", b)
		}
		if o, err := parseOutcome(b); err == nil && o.Joined == (o.Error != nil) {
			t.Fatalf("%q is an outcome that is none", b)
		}
	})
}

// FuzzRecord: an invalid record of values or registrations is an error, and its size is bounded.
func FuzzRecord(f *testing.F) {
	f.Add(pack(joined([][]byte{[]byte("a"), nil})), 2)
	roster, _ := packRoster([]Registration{{Job: "a", Workers: 2}, {Job: "a", Workers: 2}})
	f.Add(roster, 2)
	f.Add([]byte{2, 0, 0, 0}, 2)
	f.Add([]byte{255, 255, 255, 255}, 2) // negative as an int of 32 bits
	first := []byte(`{"job":"a","workers":2}`)
	f.Add(joined([][]byte{first, {memberMark, 0, 8, 3}}), 2)
	f.Add(joined([][]byte{first, {memberMark, 1, 8, 3}}), 2)
	f.Add(joined([][]byte{first, first}), 2)
	f.Fuzz(func(t *testing.T, b []byte, workers int) {
		workers = max(1, min(workers, 100))
		if record, err := unpack(b); err == nil {
			if values, err := split(record, workers); err == nil && len(values) != workers {
				t.Fatalf("%d values of %d workers", len(values), workers)
			}
		}
		for _, packed := range [][]byte{b, pack(b)} {
			registrations, err := unpackRoster(packed, workers)
			if err == nil && len(registrations) != workers {
				t.Fatalf("%d registrations of %d workers", len(registrations), workers)
			}
			for w, c := range registrations {
				if c.Worker != w || c.Workers != workers || c.check() != nil {
					t.Fatalf("worker %d of %d: %+v", w, workers, c)
				}
			}
		}
	})
}

// TestRecord: records have the values and registrations that they were made of.
func TestRecord(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.SliceOf(rapid.Byte()), 1, 20).Draw(t, "values")
		record, err := unpack(pack(joined(values)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := split(record, len(values))
		if err != nil || !slices.EqualFunc(got, values, bytes.Equal) {
			t.Fatalf("%v, %v, want %v", got, err, values)
		}
		var registrations []Registration
		for w := range values {
			registrations = append(registrations, Registration{
				Job: "j", Worker: w, Workers: len(values), PID: rapid.Int().Draw(t, "pid"),
				Host: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "host"), Nonce: fmt.Sprint("nonce ", w),
				Addr: rapid.SampledFrom([]string{"", "a", "a:0", "a:1", "a:22", "[::1]:33", "a:+4"}).Draw(t, "addr"),
				Data: rapid.SampledFrom([][]byte{nil, []byte("x"), []byte("y")}).Draw(t, "data"),
			})
		}
		packed, err := packRoster(registrations)
		if err != nil {
			t.Fatal(err)
		}
		all, err := unpackRoster(packed, len(values))
		if err != nil {
			t.Fatal(err)
		}
		first := map[string]bool{}
		for w, want := range registrations {
			host, _ := withoutPort(want.Addr)
			if group := fmt.Sprintf("%s %s %s", want.Host, host, want.Data); first[group] {
				want.Nonce = ""
			} else {
				first[group] = true
			}
			if !reflect.DeepEqual(all[w], want) {
				t.Fatalf("worker %d: %+v, want %+v", w, all[w], want)
			}
		}
	})
}

// TestFramesOfResponses: whatever the number of entries of a response, its frames are bounded, and together hold what
// was sent.
func TestFramesOfResponses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sent := response{
			id: rapid.Uint64().Draw(t, "id"), revision: rapid.Uint64().Draw(t, "revision"),
			status: status(rapid.IntRange(0, int(statuses)-1).Draw(t, "status")),
		}
		for range rapid.IntRange(0, 20).Draw(t, "entries") {
			sent.entries = append(sent.entries, Entry{
				Key: strings.Repeat("k", rapid.IntRange(0, KeyMax).Draw(t, "key")), Value: make([]byte, rapid.IntRange(0,
					300<<10).Draw(t, "value")),
				Revision: rapid.Uint64().Draw(t, "at"), Deleted: rapid.Bool().Draw(t, "deleted"),
			})
		}
		r := bytes.NewReader(sent.bytes())
		got := response{more: true}
		for got.more {
			b, err := readFrame(r)
			if err != nil {
				t.Fatal(err)
			}
			var p response
			if err := p.decode(b); err != nil {
				t.Fatal(err)
			}
			p.entries = append(got.entries, p.entries...)
			got = p
		}
		if r.Len() > 0 || !reflect.DeepEqual(got, sent) {
			t.Fatalf("%d bytes are left; got %d entries, sent %d", r.Len(), len(got.entries), len(sent.entries))
		}
	})
}

// TestFrameClaims: a frame that claims more than the maximum is refused, and one that claims more than follows
// allocates only what follows.
func TestFrameClaims(t *testing.T) {
	head := binary.LittleEndian.AppendUint32(nil, frameMax+1)
	if _, err := readFrame(bytes.NewReader(head)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a frame that is too long: %v", err)
	}
	head = append(binary.LittleEndian.AppendUint32(nil, frameMax), make([]byte, 100)...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const times = 100
	for range times {
		if _, err := readFrame(bytes.NewReader(head)); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&after)
	allocated := (after.TotalAlloc - before.TotalAlloc) / times
	if allocated > 64<<10 {
		t.Errorf("reading 100 bytes of a frame that claims %d allocates %d", frameMax, allocated)
	}
}

// TestTable compares a table with a list of all changes: what changed after each revision, and that it discards
// deletions only, and reports that.
func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type change struct {
			key     string
			deleted bool
		}
		var all []change // by revision - 1
		table := newTable()
		keys := []string{"a", "b", "a/1", "a/2"}
		for range rapid.IntRange(0, 60).Draw(t, "changes") {
			key := rapid.SampledFrom(keys).Draw(t, "key")
			switch rapid.IntRange(0, 9).Draw(t, "kind") {
			case 0, 1, 2:
				if table.remove(key) {
					all = append(all, change{key, true})
				}
			case 3:
				table.discard(rapid.IntRange(0, 3).Draw(t, "forget"))
			default:
				if err := table.set(Entry{Key: key}); err != nil {
					t.Fatal(err)
				}
				all = append(all, change{key, false})
			}
		}
		if int(table.revision) != len(all) {
			t.Fatalf("revision %d after %d changes", table.revision, len(all))
		}
		prefix := rapid.SampledFrom([]string{"", "a", "a/"}).Draw(t, "prefix")
		for after := range len(all) + 1 {
			got, err := table.changes(prefix, uint64(after))
			if uint64(after) < table.floor && after > 0 {
				if !errors.Is(err, ErrCompacted) {
					t.Fatalf("changes after %d, floor %d: %v", after, table.floor, err)
				}
				continue
			}
			latest := map[string]int{}
			for i := after; i < len(all); i++ {
				latest[all[i].key] = i
			}
			var want []Entry
			for i := after; i < len(all); i++ {
				forgotten := all[i].deleted && uint64(i+1) <= table.floor
				if c := all[i]; latest[c.key] == i && strings.HasPrefix(c.key, prefix) && !forgotten {
					want = append(want, Entry{Key: c.key, Revision: uint64(i + 1), Deleted: c.deleted})
				}
			}
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("changes of %q after %d: %+v, %v, want %+v", prefix, after, got, err, want)
			}
		}
		size := 0
		for _, e := range table.entries {
			size += cost(&e)
		}
		if table.bytes != size {
			t.Fatalf("%d bytes are counted, there are %d", table.bytes, size)
		}
	})
}

// TestFull: a store accepts no more than its limit; existing entries can still be replaced and deleted.
func TestFull(t *testing.T) {
	table := newTable()
	table.bytes = TotalMax - entryBytes - 10
	if err := table.set(Entry{Key: "k", Value: make([]byte, 9)}); err != nil {
		t.Fatal(err)
	}
	if err := table.set(Entry{Key: "l"}); !errors.Is(err, ErrFull) {
		t.Fatalf("one more: %v, want ErrFull", err)
	}
	if err := table.set(Entry{Key: "k", Value: make([]byte, 9)}); err != nil {
		t.Fatal(err)
	}
	if !table.remove("k") {
		t.Fatal("it cannot be deleted")
	}
}

func TestNumbers(t *testing.T) {
	for want, n := range map[string][]int{
		"worker 3": {3}, "workers 0-2 and 7": {0, 1, 2, 7}, "workers 1 and 2": {1, 2}, "workers 1, 3 and 5-8": {
			1, 3, 5, 6,
			7, 8,
		},
	} {
		if got := numbers(n); got != want {
			t.Errorf("%v: %q, want %q", n, got, want)
		}
	}
	var odd []int
	for i := range 100 {
		odd = append(odd, 2*i+1)
	}
	if got := numbers(odd); len(got) > 100 || !strings.HasSuffix(got, "31 and others") {
		t.Errorf("a hundred odd numbers: %q", got)
	}
}
