package checkpoint

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestContainers checks that processes with equal host names and PIDs in two containers are distinguished, whether the
// disk supports locks or not. The lock is free if its PID belongs to another process now, or if the host was restarted.
func TestContainers(t *testing.T) {
	me := Holder{Host: "trainer", PID: os.Getpid(), Job: "mine", Since: time.Now()}
	parent := Holder{Host: "trainer", PID: os.Getppid(), Job: "other", Since: time.Now()}
	if !me.identify() || !parent.identify() {
		t.Skip("needs /proc")
	}
	me.PIDs, parent.PIDs = firstPIDs, firstPIDs // wherever this test runs
	like := func(h Holder, change func(*Holder)) Holder {
		change(&h)
		return h
	}
	const held, cannotTell = "another process (host trainer, pid ", "This file system has no locks: if that process no " +
		"longer runs, remove "
	elsewhere := like(me, func(h *Holder) { h.Job, h.PIDs = "other", "pid:[4026532001]" })
	for name, c := range map[string]struct {
		h                Holder
		locked, lockless string // of the error; "": the lock is taken
	}{
		"this process":                {me, "", ""},
		"another container":           {elsewhere, held, cannotTell},
		"one on another machine":      {like(elsewhere, func(h *Holder) { h.Boot = "another" }), held, cannotTell},
		"one that had the PID before": {like(me, func(h *Holder) { h.Started++ }), held, ""},
		"one whose PID a process has": {like(parent, func(h *Holder) { h.Started++ }), held, ""},
		"one that runs":               {parent, held, held},
		"one before the host's start": {like(parent, func(h *Holder) { h.Boot = "another" }), held, ""},
		"an earlier start, elsewhere": {
			like(elsewhere, func(h *Holder) { h.Job, h.Epoch = me.Job, me.Epoch }), held,
			cannotTell,
		},
		"one that says less of itself": {like(parent, func(h *Holder) { h.Boot, h.PIDs, h.Started = "", "", 0 }), held, held},
		"this one, saying less":        {like(me, func(h *Holder) { h.Boot, h.PIDs, h.Started = "", "", 0 }), "", ""},
	} {
		for _, d := range []struct {
			disk, want string
			err        error
		}{{"with locks", c.locked, nil}, {"without", c.lockless, errors.ErrUnsupported}} {
			t.Run(name+" on a disk "+d.disk, func(t *testing.T) {
				dir := t.TempDir()
				text, err := json.Marshal(&c.h)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, lockName), text, 0o600); err != nil {
					t.Fatal(err)
				}
				l := &lock{dir: dir, me: me, try: func(*os.File) (bool, error) { return false, d.err }} // another process has it
				err = l.take()
				if err == nil {
					defer l.file.Close()
				}
				if locked := (*LockedError)(nil); d.want == "" && err != nil ||
					d.want != "" && (!errors.As(err, &locked) || !strings.Contains(err.Error(), d.want)) {
					t.Fatalf("got %v, want %q", err, d.want)
				}
				if h, err := readHolder(l.path()); err != nil || h.is(&me) != (d.want == "") {
					t.Errorf("the lock says %+v, %v", h, err)
				}
			})
		}
	}
}

// TestStarted reads the start time of a process, whatever name the process gives itself.
func TestStarted(t *testing.T) {
	const rest = " S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 8675309 1000 200 18446744073709551615"
	for stat, want := range map[string]uint64{
		"17 (sh)" + rest: 8675309, "17 (a) b (c 1 2)" + rest: 8675309,
		"17 (sh) S 1": 0, "": 0,
	} {
		if got, ok := startedIn(stat); got != want || ok != (want > 0) {
			t.Errorf("%q: got %d, %v", stat, got, ok)
		}
	}
	h := Holder{PID: os.Getpid()}
	if again := h; !h.identify() || !again.identify() || !h.is(&again) || !h.known() {
		t.Errorf("got %+v, then %+v", h, again)
	}
}
