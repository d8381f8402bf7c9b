package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// watched is an etcd that serves watches only: every change of the keys below "p/k/" gets the next revision.
type watched struct {
	mu        sync.Mutex
	changes   []string   // "key value", by revision from 1
	changed   *sync.Cond // also when breaks is set
	compacted uint64     // revisions up to this one are discarded
	begun     []uint64   // the first revision of each watch
	open      int
	cut       int // number of first watches that break
}

// newWatched returns one with a change: after revision 0 a store is listed, not watched.
func newWatched() *watched {
	e := &watched{changes: []string{"k/0 first"}}
	e.changed = sync.NewCond(&e.mu)
	return e
}

func (e *watched) set(key, value string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.changes = append(e.changes, key+" "+value)
	e.changed.Broadcast()
}

// breakOff ends all watches.
func (e *watched) breakOff() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cut = len(e.begun)
	e.changed.Broadcast()
}

func (e *watched) count() (begun, open int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.begun), e.open
}

func (e *watched) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/v3/watch" {
		fmt.Fprint(w, `{"header":{"revision":"1"}}`) // no such key
		return
	}
	var q struct {
		Create struct {
			Start uint64 `json:"start_revision,string"`
		} `json:"create_request"`
	}
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		panic(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	next := q.Create.Start
	e.begun = append(e.begun, next)
	number := len(e.begun)
	e.open++
	defer func() { e.open-- }()
	if next <= e.compacted {
		fmt.Fprintf(w, `{"result":{"canceled":true,"compact_revision":"%d"}}`, e.compacted)
		return
	}
	go func() { // Wait does not notice a closed connection
		<-r.Context().Done()
		e.mu.Lock() // else it may be about to wait
		defer e.mu.Unlock()
		e.changed.Broadcast()
	}()
	fmt.Fprint(w, `{"result":{"created":true}}`)
	for ; e.cut < number && r.Context().Err() == nil; e.changed.Wait() {
		for ; next <= uint64(len(e.changes)); next++ {
			var kv etcdKV
			var key, value string
			_, _ = fmt.Sscan(e.changes[next-1], &key, &value)
			kv.Key, kv.Value, kv.ModRevision = []byte("p/"+key), append([]byte{etcdPlain}, value...), next
			text, err := json.Marshal(kv)
			if err != nil {
				panic(err)
			}
			fmt.Fprintf(w, `{"result":{"events":[{"kv":%s}]}}`, text)
		}
		_ = http.NewResponseController(w).Flush()
	}
	if number%2 == 0 {
		panic(http.ErrAbortHandler) // breaks the connection instead of closing it
	}
}

// openWatched opens a store there that keeps unused watches for that long.
func openWatched(t *testing.T, e *watched, unused time.Duration) *etcdStore {
	t.Helper()
	server := httptest.NewServer(e)
	t.Cleanup(server.Close)
	s, err := Open(t.Context(), "etcd://"+strings.TrimPrefix(server.URL, "http://")+"/p", Config{Etcd: &EtcdConfig{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	s.(*etcdStore).watches.keep = unused
	return s.(*etcdStore)
}

// await waits until at most that many watches are open.
func (e *watched) await(most int) {
	for _, open := e.count(); open > most; _, open = e.count() {
		time.Sleep(time.Millisecond)
	}
}

// TestEtcdWatch: readers receive every change once, in order, however often their watches break; each opens another
// only then.
func TestEtcdWatch(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	const changes, readers = 300, 2
	for name, breaks := range map[string]float64{"sound": 0, "broken": 0.1} {
		t.Run(name, func(t *testing.T) {
			e := newWatched()
			s := openWatched(t, e, time.Hour)
			var work sync.WaitGroup
			for reader := range readers {
				work.Go(func() {
					for at := uint64(1); at <= changes; {
						entries, now, err := s.Changes(t.Context(), "k/", at)
						if err != nil || len(entries) != 1 || entries[0].Revision != at+1 || now != at+1 ||
							string(entries[0].Value) != strconv.FormatUint(at+1, 10) {
							t.Errorf("reader %d after revision %d: %+v, %d, %v", reader, at, entries, now, err)
							return
						}
						at = now
					}
				})
			}
			random, broken := rand.New(rand.NewPCG(seed, 1)), 0
			for i := range changes {
				e.set(fmt.Sprint("k/", random.IntN(3)), strconv.Itoa(i+2))
				if random.Float64() < breaks {
					e.breakOff()
					broken++
				}
				time.Sleep(time.Duration(random.IntN(300)) * time.Microsecond)
			}
			work.Wait()
			const slow = 20 // a machine that pauses for seconds opens a watch again
			if begun, _ := e.count(); begun > readers*(1+broken)+slow {
				t.Errorf("%d watches for %d changes, which %d read, and %d breaks", begun, changes, readers, broken)
			}
		})
	}
}

// TestEtcdWatchesEnd: unused watches are closed, and so are those whose call has ended without a change.
func TestEtcdWatchesEnd(t *testing.T) {
	e := newWatched()
	s := openWatched(t, e, time.Hour)
	begin := func(s *etcdStore, n int) {
		for i := range n {
			if entries, _, err := s.Changes(t.Context(), fmt.Sprint("k", strings.Repeat("/", i)), 1); err != nil ||
				len(entries) != 1 {
				t.Fatalf("%+v, %v", entries, err)
			}
		}
	}
	e.set("k/////////////////////////////////////////", "is")
	begin(s, 2*watchesMax)
	e.await(watchesMax)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, _, err := s.Changes(ctx, "k", 2)
		ended <- err
	}()
	begun, _ := e.count()
	for now := begun; now == begun && now < 2*watchesMax+1; now, _ = e.count() { // it may continue with a kept one
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	e.await(0)
	begin(openWatched(t, e, time.Millisecond), 3)
	e.await(0)
}

// TestEtcdWatchCompacted: a reader whose revision is compacted gets an error, on an open watch too, and can continue
// from the current revision.
func TestEtcdWatchCompacted(t *testing.T) {
	e := newWatched()
	s := openWatched(t, e, time.Hour)
	e.set("k/a", "one")
	if _, at, err := s.Changes(t.Context(), "k/", 1); at != 2 || err != nil {
		t.Fatalf("%d, %v", at, err)
	}
	e.set("k/a", "two")
	e.mu.Lock()
	e.compacted = 3
	e.mu.Unlock()
	if _, _, err := s.Changes(t.Context(), "k/", 1); !errors.Is(err, ErrCompacted) {
		t.Errorf("got %v", err)
	}
	// the watch had it in time
	if entries, at, err := s.Changes(t.Context(), "k/", 2); at != 3 || len(entries) != 1 || err != nil {
		t.Errorf("%+v, %d, %v", entries, at, err)
	}
	e.breakOff()
	e.set("k/a", "three")
	if _, at, err := s.Changes(t.Context(), "k/", 3); at != 4 || err != nil {
		t.Errorf("%d, %v", at, err)
	}
}

// TestEtcdCloseDuringChanges: a call that Close ends returns ErrClosed, even if what it waits for ends before its own
// context.
func TestEtcdCloseDuringChanges(t *testing.T) {
	for range 20 {
		e := newWatched()
		s := openWatched(t, e, time.Hour)
		ended := make(chan error)
		go func() {
			_, _, err := s.Changes(t.Context(), "k/", 1)
			ended <- err
		}()
		for begun, _ := e.count(); begun == 0; begun, _ = e.count() {
			time.Sleep(100 * time.Microsecond)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Fatalf("got %v, want %v", err, ErrClosed)
		}
	}
	for range 200 {
		s := openWatched(t, newWatched(), time.Hour)
		err := s.call(t.Context(), nil, func(context.Context) error {
			s.end(ErrClosed)
			return errors.New("the watch has ended")
		})
		if !errors.Is(err, ErrClosed) {
			t.Fatalf("got %v, want %v", err, ErrClosed)
		}
	}
}
