// Package waiting decides how a rank waits for other ranks, for all transports: it polls, yields its processor,
// sleeps shortly in a system call of its thread, or blocks until it is woken.
//
// A [Waiter] holds what a rank has learned from its last waits. [Waiter.Wait] is one wait, for a [Condition] of the
// transport.
package waiting

import (
	"context"
	"runtime"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// Condition is what a rank waits for.
type Condition interface {
	// Poll does what it can without blocking, and reports whether the wait is over.
	Poll() bool
	// Progress returns a number that grows as data of the wait moves, by its bytes.
	Progress() uint64
	// Nap blocks the thread in a system call until the condition may have changed, for at most the given time. It
	// reports whether it did, or may have: if not, Park follows. It is called with Config.Nap only.
	Nap(most time.Duration) bool
	// Park blocks by [transport.Park] until the condition may have changed, and returns nil. It returns an error if the
	// condition cannot become true any more, or ctx ends.
	Park(ctx context.Context) error
}

// Room is the processor time that the ranks have.
type Room uint8

const (
	// None: waiting ranks do not poll, since the awaited ranks need their processors of Go's scheduler, or their share
	// of the CPU time.
	None Room = iota
	// Shared: the host has fewer CPUs than ranks, so they yield them to each other.
	Shared
	// Own: each rank has a CPU.
	Own
)

// Config describes the waits of a rank.
type Config struct {
	// Rank is the rank's number: ranks on one CPU leave it one after the other.
	Rank int
	// Room returns the room of the ranks now. It is called in every few waits that do not end soon.
	Room func(now time.Time) Room
	// Batch is the number of polls between two yields with fewer CPUs than ranks: some 100 nanoseconds.
	Batch int
	// Goroutines says that the awaited ranks are goroutines of this process: a rank yields to goroutines, not to
	// threads.
	Goroutines bool
	// Pause is how long a rank takes no turns after they have taken long; see turnsTime.
	Pause time.Duration
	// Nap is the longest nap, [NapMost]; 0: there are none.
	Nap time.Duration
}

const (
	// The duration of polling without progress, with a CPU for each rank, after which a wait sleeps: longer than
	// sleeping and waking up takes, than a short interruption of the awaited rank, and than that takes to reduce a
	// segment.
	spinTime = 100 * time.Microsecond
	// The batches of polls before the first round, with a CPU for each rank, and the batches of each round, which ends
	// with a yield. The first ones take about as long as peers that compute at the same pace are apart: yielding takes
	// as long as a small call. They are left out if the last wait has ended as the rank yielded: then the awaited rank
	// probably needs this processor.
	batchesFirst = 24
	batchesOwn   = 4
	// The rounds after which a rank that yields to goroutines also yields to threads.
	roundsThreads = 32
	// The rounds of a wait after which it sleeps if no time has passed, as in a bubble of testing/synctest.
	roundsStill = 32
	// The number of waits between two looks at the room.
	lookEvery = 16
)

// With fewer CPUs than ranks a waiting rank yields its CPU, so that the ranks of a CPU take turns: in most waits
// its data arrives while the others run. A CPU that still has a rank to run does not become idle, and no rank has
// to be woken, which takes longer than a turn. A rank that has waited for turnsTime sleeps.
//
// Where a yielded CPU does not return within turnsTime, another thread computes there: it keeps the CPU for a time
// slice of some milliseconds, while a rank that sleeps gets it as soon as data arrives. So the rank sleeps, and
// does so at once in all waits of the next Config.Pause.
const (
	turnsTime = 500 * time.Microsecond
	// How often a rank that yields to threads also lets other goroutines run. That may wake another thread of the
	// process, which looks for goroutines, and so takes longer than a turn.
	goroutinesEvery = time.Millisecond
)

// Two ranks can be on one CPU while another is idle. When a thread wakes up, or Go's scheduler wakes one to take
// one of two ranks on a thread, the system may let it wait for the CPU of the thread that wakes it. Linux does so
// in a virtual machine, until it balances the load after some milliseconds; probably it takes an idle CPU, which
// the hypervisor has stopped, for a preempted one. Ranks that hand the CPU over to each other by yielding may keep
// it waiting for long. So a rank moves its thread to another CPU after handoversMax waits in succession that have
// ended as it yielded, if another thread has run there meanwhile: the other rank's, or one that waits to take it.
// Each rank needs another number of such waits, so that one of them leaves and the other one stays.
const (
	handoversMax   = 16
	handoversApart = 2                    // between the numbers of two ranks
	yieldTime      = 2 * time.Microsecond // longer than yielding to no thread takes
)

// A nap is not ended by the context of the wait, so it lasts at most NapMost. While naps follow each other, Park
// takes the place of one every parkEvery. NapMost is longer than the 10 ms after which Go's monitor thread certainly
// gives the processors of napping ranks to other goroutines: these may be the ranks that end the naps, and after the
// first such case it looks more often.
const (
	NapMost   = 20 * time.Millisecond
	parkEvery = 20 * time.Millisecond
)

// Waiter is how one rank waits. The rank's goroutine uses it.
type Waiter struct {
	cfg       Config
	room      Room
	waits     uint // that have not ended soon
	handovers int  // number of waits, in succession, that have ended as the rank yielded
	mover     affinity.Mover
	yielded   time.Time // when a wait last let other goroutines run
	turnsAt   time.Time // from when on waits take turns
	napped    time.Time // when the last nap ended
	parkAt    time.Time // from when on the next wait parks
}

// New returns a Waiter.
func New(cfg Config) Waiter {
	w := Waiter{cfg: cfg}
	w.Look(time.Now())
	return w
}

// Look determines the room of the ranks.
func (w *Waiter) Look(now time.Time) { w.room = w.cfg.Room(now) }

// Wait waits until c is true, and returns nil, or until Park returns an error.
func (w *Waiter) Wait(ctx context.Context, c Condition) error {
	for slow := false; ; {
		if slow && Exhaust(c) || !slow && w.spin(c) {
			return nil
		}
		if w.room == None && w.cfg.Nap == 0 { // often, so without a look at the clock
			if err := c.Park(ctx); err != nil {
				return err
			}
			continue
		}
		since, before := time.Now(), c.Progress()
		if w.naps(since) && c.Nap(w.cfg.Nap) {
			w.napped = time.Now()
		} else if err := c.Park(ctx); err != nil {
			return err
		}
		slow = isSlow(c.Progress()-before, time.Since(since))
	}
}

// isSlow reports whether bytes that arrived while a rank slept for this duration came over a slow link, below 4
// Gbit/s. Between its packets a rank does not spin: at 1 Gbit/s it would spin for a quarter of the time.
func isSlow(bytes uint64, slept time.Duration) bool {
	return slept > spinTime && bytes < uint64(slept.Nanoseconds()/2)
}

// Exhaust polls until that makes no progress, and reports whether the wait is over: data that a transport buffers
// may be invisible to the system call or the goroutine that wakes the rank.
func Exhaust(c Condition) bool {
	for {
		before := c.Progress()
		if c.Poll() {
			return true
		}
		if c.Progress() == before {
			return false
		}
	}
}

// spin polls and yields for a while, and reports whether c is true.
func (w *Waiter) spin(c Condition) bool {
	if w.room == Own && w.handovers == 0 && polls(c, batchesFirst*w.cfg.Batch) {
		return true
	}
	if w.waits++; w.waits%lookEvery == 0 {
		w.Look(time.Now())
	}
	if w.room == None {
		return Exhaust(c)
	}
	now := time.Now()
	most, batch := turnsTime, w.cfg.Batch
	switch {
	case w.room == Own:
		most, batch = spinTime, batchesOwn*w.cfg.Batch
		w.leave()
	case !affinity.CanYield || now.Before(w.turnsAt):
		return Exhaust(c)
	}
	since, moved := now, c.Progress()
	for round := 0; ; round++ {
		if polls(c, batch) {
			w.handovers = 0
			return true
		}
		if at := c.Progress(); at != moved {
			now = time.Now()
			moved, since = at, now
			continue
		}
		if w.yield(now, round); c.Poll() {
			w.handovers++
			return true
		}
		back := time.Now()
		if w.room == Shared && back.Sub(now) > turnsTime {
			w.turnsAt = back.Add(w.cfg.Pause)
		}
		if idle := back.Sub(since); idle > most || idle == 0 && round >= roundsStill {
			w.handovers = 0
			return Exhaust(c)
		}
		now = back
	}
}

// polls polls so many times, and reports whether c is true.
func polls(c Condition, n int) bool {
	for range n {
		if c.Poll() {
			return true
		}
	}
	return false
}

// leave moves the rank's thread to another CPU if another rank hands this one over to it.
func (w *Waiter) leave() {
	if w.handovers == 0 || w.handovers%(handoversMax+w.cfg.Rank%handoversMax*handoversApart) != 0 {
		return
	}
	now := time.Now()
	if affinity.Yield(); time.Since(now) >= yieldTime {
		w.mover.Leave()
	}
}

// yield lets others run on this rank's processor, in this round of a wait.
func (w *Waiter) yield(now time.Time, round int) {
	if w.cfg.Goroutines || now.Sub(w.yielded) > goroutinesEvery {
		w.yielded = now
		runtime.Gosched()
	}
	if !w.cfg.Goroutines || round >= roundsThreads {
		affinity.Yield()
	}
}

// naps reports whether the next sleep is a nap. There is none while other goroutines want this processor of Go's
// scheduler, which the system call would keep from them for up to 10 ms.
func (w *Waiter) naps(now time.Time) bool {
	if w.cfg.Nap == 0 {
		return false
	}
	if runtime.Gosched(); time.Since(now) > spinTime {
		return false
	}
	if now.Sub(w.napped) > parkEvery {
		w.parkAt = now.Add(parkEvery)
	} else if now.After(w.parkAt) {
		w.parkAt = now.Add(parkEvery)
		return false
	}
	return true
}
