package affinity

import (
	"fmt"
	"math/bits"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLeave moves a thread. Other load may move it back at once, so that it is only seen after some attempts.
func TestLeave(t *testing.T) {
	before := Allowed()
	if len(before) < 2 {
		t.Skip("one CPU")
	}
	done := make(chan error)
	go func() { // its thread ends with it
		runtime.LockOSThread()
		done <- func() error {
			for attempt := 0; ; attempt++ {
				cpu := current()
				var m Mover
				m.Leave()
				now := current()
				if after := Allowed(); !slices.Equal(after, before) {
					return fmt.Errorf("CPUs %v after Leave, want %v as before", after, before)
				}
				if now != cpu {
					break
				}
				if attempt == 1000 {
					return fmt.Errorf("it still runs on CPU %d after 1000 attempts", cpu)
				}
			}
			only := maskOf(0)
			only.Zero()
			only.Set(before[0])
			if err := unix.SchedSetaffinityDynamic(0, only); err != nil {
				return err
			}
			var m Mover
			m.Leave()
			if after := Allowed(); !slices.Equal(after, before[:1]) {
				return fmt.Errorf("CPUs %v after Leave on a bound thread, want %v as before", after, before[:1])
			}
			Run(before, func() {})
			if after := Allowed(); !slices.Equal(after, before[:1]) {
				return fmt.Errorf("CPUs %v after Run on a bound thread, want %v as before", after, before[:1])
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestRestore binds a thread, changes its CPUs as taskset does, and restores those of before: the change stays. Without
// one the thread has all CPUs again, or those to which it was bound before.
func TestRestore(t *testing.T) {
	allowed := Allowed()
	if len(allowed) < 2 {
		t.Skip("one CPU")
	}
	all := maskOf(0)
	only := func(cpu int) unix.CPUSetDynamic {
		set := slices.Clone(all)
		set.Zero()
		set.Set(cpu)
		return set
	}
	first, second := only(allowed[0]), only(allowed[1])
	bad := only(allowed[1]) // the system ignores a CPU that does not exist
	bad.Set(len(bad)*bits.UintSize - 1)
	for _, c := range []struct {
		name                         string
		before, bound, changed, want unix.CPUSetDynamic
	}{
		{"not changed", all, second, second, all},
		{"not changed, a CPU that does not exist", all, bad, second, all},
		{"not changed, bound before", first, second, second, first},
		{"bound meanwhile", all, second, first, first},
		{"bound meanwhile and before", second, first, second, second},
		{"released meanwhile", first, second, all, all},
	} {
		done := make(chan struct{})
		go func() { // its thread ends with it
			defer close(done)
			runtime.LockOSThread()
			if err := unix.SchedSetaffinityDynamic(0, c.changed); err != nil {
				t.Error(err)
			}
			if !restore(c.before, slices.Clone(c.bound), slices.Clone(all), slices.Clone(all)) {
				t.Errorf("%s: not restored", c.name)
			}
			if got := maskOf(0); !slices.Equal(got, c.want) {
				t.Errorf("%s: CPUs %v, want %v", c.name, got, c.want)
			}
		}()
		<-done
	}
}

// TestMoverPause calls a Mover often: it moves once in each pause. The pauses double, and begin anew after some time.
func TestMoverPause(t *testing.T) {
	var m Mover
	m.Leave()
	first := m.moved
	for range 10 {
		if m.Leave(); m.moved != first && m.moved.Sub(first) < pauseFirst {
			t.Fatalf("it moved twice within %v", m.moved.Sub(first))
		}
	}
	for want := pauseFirst; want < pauseMost; want = min(2*want, pauseMost) {
		m = Mover{moved: time.Now().Add(-want), pause: want}
		if m.Leave(); m.pause != min(2*want, pauseMost) && m.pause != pauseFirst {
			t.Errorf("after a pause of %v the next is %v", want, m.pause)
		}
	}
	m = Mover{moved: time.Now().Add(-2 * pauseReset), pause: pauseMost}
	if m.Leave(); m.pause != pauseFirst {
		t.Errorf("long after the last move the pause is %v, want %v", m.pause, pauseFirst)
	}
}
