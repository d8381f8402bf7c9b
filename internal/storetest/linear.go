package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// testLinearizable lets users change a few keys at once, and searches for an order of the operations on each key that
// explains what each one returned, in which an operation that ended before another began comes first.
func testLinearizable(s *suite) {
	random := s.seed()
	users := s.several(4)
	rounds := s.times(60, 6)
	for round := range rounds {
		keys := []string{fmt.Sprintf("l/%d/a", round), fmt.Sprintf("l/%d/b", round)}
		var clock atomic.Int64
		histories := make([][]operation, len(users))
		var work sync.WaitGroup
		for i, u := range users {
			r := rand.New(rand.NewPCG(random.Uint64(), 3))
			work.Go(func() {
				known := map[string]uint64{}
				for j := range 8 {
					op := operation{kind: kind(r.IntN(int(kinds))), key: keys[r.IntN(2)], value: fmt.Sprintf("%d.%d", i, j)}
					op.revision = known[op.key]
					op.began = clock.Add(1)
					err := op.do(s, u)
					op.ended = clock.Add(1)
					if err != nil {
						s.Error(err)
						return
					}
					if op.kind == get && op.yes {
						known[op.key] = op.revision
					}
					histories[i] = append(histories[i], op)
				}
			})
		}
		work.Wait()
		for _, key := range keys {
			var history []operation
			for _, op := range slices.Concat(histories...) {
				if op.key == key {
					history = append(history, op)
				}
			}
			if !linearizable(history) {
				s.Fatalf("round %d: no order explains these operations:\n%s", round, list(history))
			}
		}
	}
}

type kind int

const (
	get kind = iota
	set
	create
	swap
	remove
	kinds
)

// operation is one call, when it began and ended, and what it returned.
type operation struct {
	kind         kind
	key, value   string // given
	revision     uint64 // given to swap, returned by get
	yes          bool   // found, created, swapped
	seen         string // by get, create
	began, ended int64
}

func (o *operation) do(s *suite, u rendezvous.Store) (err error) {
	var seen []byte
	switch o.kind {
	case get:
		var revision uint64
		seen, revision, err = u.Get(s.ctx, o.key)
		o.yes, o.revision = err == nil, revision
		if errors.Is(err, rendezvous.ErrNotFound) {
			err = nil
		}
	case set:
		err = u.Set(s.ctx, o.key, []byte(o.value))
	case create:
		seen, o.yes, err = u.Create(s.ctx, o.key, []byte(o.value))
	case swap:
		o.yes, err = u.Swap(s.ctx, o.key, o.revision, []byte(o.value))
	case remove:
		err = u.Delete(s.ctx, o.key)
	}
	o.seen = string(seen)
	return err
}

// state is the state of a key. Its revision is 0 until an operation returned it.
type state struct {
	there    bool
	value    string
	revision uint64
	highest  uint64 // of all revisions that were seen
}

// next returns the state after an operation, or false if it cannot have returned what it did.
func (a state) next(o *operation) (state, bool) {
	written := state{there: true, value: o.value, highest: a.highest}
	switch o.kind {
	case get:
		if o.yes != a.there || o.seen != a.value {
			return a, false
		}
		if a.there && a.revision == 0 && o.revision > a.highest {
			a.revision, a.highest = o.revision, o.revision
		}
		return a, !a.there || a.revision == o.revision
	case set:
		return written, true
	case create:
		if o.yes {
			return written, !a.there
		}
		return a, a.there && a.value == o.seen
	case swap:
		// A swap has a revision that was read: if the key still has it, it is known here.
		if fits := a.there && a.revision != 0 && a.revision == o.revision; !fits || !o.yes {
			return a, fits == o.yes
		}
		return written, true
	}
	return state{highest: a.highest}, true
}

// linearizable searches for an order of the operations (Wing and Gong's search, with a memory of what was tried: Lowe
// 2017).
func linearizable(history []operation) bool {
	type point struct {
		done uint64 // bits
		at   state
	}
	tried := map[point]bool{}
	all := uint64(1)<<len(history) - 1
	var search func(p point) bool
	search = func(p point) bool {
		if p.done == all {
			return true
		}
		if tried[p] {
			return false
		}
		tried[p] = true
		soonest := int64(1 << 62) // end of those that are left
		for i := range history {
			if p.done>>i&1 == 0 {
				soonest = min(soonest, history[i].ended)
			}
		}
		for i := range history {
			if p.done>>i&1 == 1 || history[i].began > soonest {
				continue
			}
			if at, ok := p.at.next(&history[i]); ok && search(point{p.done | 1<<i, at}) {
				return true
			}
		}
		return false
	}
	return search(point{})
}

func list(history []operation) string {
	var b strings.Builder
	for _, o := range history {
		fmt.Fprintf(&b, "%3d-%3d %s value %s, revision %d: %v, saw %q\n", o.began, o.ended,
			[]string{"get", "set", "create", "swap", "delete"}[o.kind], o.value, o.revision, o.yes, o.seen)
	}
	return b.String()
}
