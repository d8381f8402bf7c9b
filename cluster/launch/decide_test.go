package launch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// text describes an action in one line.
func text(a action) string {
	switch a := a.(type) {
	case printText:
		return "print " + strings.TrimSpace(strings.ReplaceAll(string(a), "lockstep run: ", ""))
	case publish:
		return "publish " + a.path()
	case propose:
		return "propose " + a.path()
	case signalWorkers:
		return "signal " + signalName(a.sig)
	case haltWorker:
		return fmt.Sprintf("halt %d", a.rank)
	case publishFailure:
		return fmt.Sprintf("publish the failure of %d: %s", a.Worker, a.Message)
	case printFailure:
		text := fmt.Sprintf("print that worker %d failed", a.report.Root.Worker)
		if a.of.number > 0 {
			text += fmt.Sprintf(", restart %d", a.of.number)
		}
		return text
	case pauseFor:
		return fmt.Sprintf("pause for %v", a.Duration)
	case endJob:
		return fmt.Sprintf("end the job with %d: %s", a.code, a.why)
	case withdraw:
		return fmt.Sprintf("withdraw with %d: %v", a.Code, a.err)
	}
	return strings.TrimPrefix(fmt.Sprintf("%T", a), "launch.")
}

// slotOf returns the slot of a node that is ready for an epoch; n is its agent's nonce.
func slotOf(node int, nonce string, epoch uint32) *nodeSlot {
	return &nodeSlot{
		registration: registration{Node: node, Host: "h", PID: 10 + node, Workers: 1, Ports: []int{1}}, Nodes: 2,
		Nonce: nonce, State: present, Epoch: epoch, Ready: true,
	}
}

// changed returns a slot with a change.
func changed(s *nodeSlot, change func(*nodeSlot)) *nodeSlot {
	change(s)
	return s
}

func lostSlot(node int, nonce string, epoch uint32) *nodeSlot {
	return changed(slotOf(node, nonce, epoch), func(s *nodeSlot) { s.State, s.Why = lost, "no heartbeat for 30s" })
}

func membersOf(epoch uint32, nonces ...string) *epochMembers {
	m := &epochMembers{ofEpoch: ofEpoch{epoch}}
	for node, nonce := range nonces {
		m.Slots = append(m.Slots, *slotOf(node, nonce, epoch))
	}
	return m
}

// exitOf returns the exit of a worker: a failure of some kind, or "".
func exitOf(rank int, kind string) exited {
	x := exit{Record: failure.Record{Worker: rank, Host: "h", PID: 100 + rank, Step: -1, Kind: kind}, started: true}
	if x.clean = kind == ""; !x.clean {
		x.failed, x.ExitCode, x.Message = true, 3, kind+" of a worker"
	}
	x.signalled, x.seen = kind == "interrupted", "; last seen in step 7"
	return exited{x}
}

// turn is an input, some time after the one before it, and the actions that follow.
type turn struct {
	after time.Duration
	in    input
	want  []string
}

func restarts(s *nodeSlot) *nodeSlot {
	return changed(s, func(s *nodeSlot) { s.RestartsMax = 1 })
}

// joined are the first turns of node 0 of two, until the epoch 0 has begun.
var joined = []turn{
	{0, begin{}, []string{"readMessages"}},
	{0, found{}, []string{"writeSlot"}},
	{0, written{done: true}, []string{"takeReports"}},
	{0, reporting{}, []string{"readMessages"}},
	{0, found{messages: []message{slotOf(0, "a", 0)}}, []string{"startPeers", "joinEpoch"}},
	{0, ready{slot: slotOf(0, "a", 0)}, nil},
	{0, slotOf(1, "b", 0), []string{"propose members/0"}},
	{0, membersOf(0, "a", "b"), []string{"startWorkers"}},
	{0, launched{}, nil},
}

// TestDecide: what the launcher does next, without processes, a clock or a store.
func TestDecide(t *testing.T) {
	cut := fmt.Errorf("%w: no route", rendezvous.ErrLost)
	gather := []string{"gatherRecords"}
	for _, c := range []struct {
		name   string
		change func(*Config)
		turns  []turn
		code   int    // of the outcome
		err    string // a part of it; "": none
		runs   bool   // the agent has no result yet
	}{
		{"one node", func(c *Config) { c.Nodes = 1 }, []turn{
			{0, begin{}, []string{"takeReports"}},
			{0, reporting{}, []string{"joinEpoch"}},
			{0, ready{slot: slotOf(0, "a", 0)}, []string{"startWorkers"}},
			{0, launched{}, nil},
			{time.Second, exitOf(0, ""), gather},
			{0, gathered{}, []string{"releaseWorkers"}},
		}, 0, "", false},
		{"one node fails and is restarted", func(c *Config) { c.Nodes, c.RestartsMax = 1, 1 }, []turn{
			{0, begin{}, []string{"takeReports"}},
			{0, reporting{}, []string{"joinEpoch"}},
			{0, ready{slot: slotOf(0, "a", 0)}, []string{"startWorkers"}},
			{time.Second, exitOf(0, "panic"), gather},
			{0, gathered{}, []string{
				"releaseWorkers", "print that worker 0 failed",
				"print waiting 1s before the restart: the workers made no progress", "pause for 1s",
			}},
			{time.Second, waited{}, []string{"joinEpoch"}},
			{0, ready{slot: slotOf(0, "a", 1)}, []string{"print starting all 1 workers again: restart 1 of 1", "startWorkers"}},
			{time.Second, exitOf(0, "panic"), gather},
			{0, gathered{}, []string{"releaseWorkers", "print that worker 0 failed, restart 1"}},
		}, 3, "", false},
		{"another agent has the slot", nil, []turn{
			{0, begin{}, []string{"readMessages"}},
			{0, found{messages: []message{slotOf(0, "x", 0)}}, []string{
				"print node 0 (host h, pid 10) has this node slot: checking its heartbeat for up to 30s", "checkHolder",
			}},
			{time.Second, contest{alive: true}, []string{"withdraw with 1: node 0 of job \"j\" joined twice: its agent is on " +
				"host h as pid 10, and is alive; this one is on host h as pid 10"}},
		}, 1, "joined twice", false},
		{"another agent had the slot", func(c *Config) { c.RestartsMax = 1 }, []turn{
			{0, begin{}, []string{"readMessages"}},
			{0, found{messages: []message{restarts(slotOf(0, "x", 0)), membersOf(0, "x", "b")}}, []string{
				"print node 0 (host h, pid 10) has this node slot: checking its heartbeat for up to 30s", "checkHolder",
			}},
			{30 * time.Second, contest{}, []string{"readMessages"}},
			{0, found{messages: []message{restarts(slotOf(0, "x", 0)), membersOf(0, "x", "b")}}, []string{"writeSlot"}},
			{0, written{}, []string{"readMessages"}},
			{0, found{messages: []message{restarts(slotOf(0, "y", 0)), membersOf(0, "x", "b")}}, []string{
				"print node 0 (host h, pid 10) has this node slot: checking its heartbeat for up to 30s", "checkHolder",
			}},
		}, 0, "", true},
		{"it cannot be replaced", nil, []turn{
			{0, begin{}, []string{"readMessages"}},
			{0, found{messages: []message{lostSlot(0, "x", 0), membersOf(0, "x", "b")}}, []string{
				"withdraw with 1: job \"j\" has started with node 0 (host h, pid 10), which cannot be replaced with " +
					"--max-restarts 0; if that run of the job is over, choose another --rdzv-id",
			}},
		}, 1, "cannot be replaced", false},
		{"a node expects another number of nodes", nil, []turn{
			joined[0], joined[1], joined[2], joined[3],
			{
				0,
				found{messages: []message{slotOf(0, "a", 0), changed(slotOf(1, "b", 0), func(s *nodeSlot) { s.Nodes = 3 })}},
				[]string{
					"end the job with 1: node 1 (host h, pid 11) expects 3 nodes, but node 0 (host h, pid 10) expects 2",
					"withdraw with 1: node 1 (host h, pid 11) expects 3 nodes, but node 0 (host h, pid 10) expects 2",
				},
			},
		}, 1, "expects 3 nodes", false},
		{"the job is over", func(c *Config) { c.StoreHolder = "node 0" }, []turn{
			{0, begin{}, []string{"readMessages"}},
			{0, found{messages: []message{&jobEnd{Node: 1, Code: 7}}}, []string{
				"withdraw with 1: the job has ended with code 7 at " + time.Time{}.Local().Format("2006-01-02 15:04:05"),
			}},
		}, 1, "the job has ended with code 7", false},
		{"an earlier run is over", nil, []turn{
			{0, begin{}, []string{"readMessages"}},
			{0, found{messages: []message{slotOf(1, "z", 0), &jobEnd{Node: 1, Nonce: "z", Code: 7}}}, []string{
				"print an earlier run of job \"j\" is over: the job has ended with code 7 at " +
					time.Time{}.Local().Format("2006-01-02 15:04:05") + "; starting a new run", "clearEnds",
			}},
			{0, cleared{}, []string{"readMessages"}},
			{0, found{messages: []message{
				changed(slotOf(1, "z", 0), func(s *nodeSlot) { s.JobEnd = &jobEnd{Node: 1, Nonce: "z", Code: 7} }),
			}}, []string{"clearEnds"}},
			{0, cleared{}, []string{"readMessages"}},
			{0, found{messages: []message{
				changed(slotOf(1, "b", 0), func(s *nodeSlot) { s.JobEnd = &jobEnd{Node: 1, Nonce: "b", Code: 8} }),
			}}, []string{"withdraw with 1: the job has ended with code 8 at " +
				time.Time{}.Local().Format("2006-01-02 15:04:05")}},
		}, 1, "with code 8", false},
		{"stopped as it takes the slot", nil, []turn{
			{0, begin{}, []string{"readMessages"}},
			{
				0,
				found{stoppable: stoppable{sig: os.Interrupt}},
				[]string{"withdraw with 130: node 0 was stopped by SIGINT (Ctrl-C) before all nodes joined"},
			},
		}, 130, "before all nodes joined", false},
		{"two nodes", nil, slices.Concat(joined, []turn{
			{time.Second, exitOf(0, ""), gather},
			{0, gathered{}, []string{"publish end/0/0"}},
			{time.Hour, &nodeEnd{Node: 1}, []string{"releaseWorkers", "end the job with 0: "}},
		}), 0, "", false},
		{"a node is missing", nil, slices.Concat(joined[:6], []turn{
			{time.Minute, tick{}, []string{"probeStore"}},
			{0, probed{unrelated: "; another job is there"}, []string{"end the job with 1: rendezvous of job \"j\" (epoch 0) " +
				"timed out after 1m0s: 1 of 2 nodes joined (node 0 (host h, pid 10)); node 1 is missing; another job is there"}},
		}), 1, "node 1 is missing", false},
		{"the store is out of reach at the start", nil, slices.Concat(joined[:6], []turn{
			{time.Second, storeLost{cut}, []string{"print node 0 cannot reach the other nodes, and retries: " + cut.Error()}},
			{time.Minute, tick{}, []string{"probeStore"}},
			{0, probed{err: cut}, nil},
		}), 1, "node 0 (host h, pid 10) cannot reach the rendezvous store", false},
		{"the store has ended at the start", nil, slices.Concat(joined[:6], []turn{
			{time.Second, storeLost{rendezvous.ErrEnded}, nil},
		}), 1, "the store cannot be reached any more", false},
		{"the user stops another node at the start", nil, slices.Concat(joined[:6], []turn{
			{0, &interruption{Node: 0, Terminate: true}, nil}, // an echo
			{0, &interruption{Node: 1, Terminate: true}, []string{"end the job with 130: node 1 was stopped by SIGTERM"}},
		}), 130, "node 1 was stopped by SIGTERM", false},
		{"another agent has ended the job at the start", nil, slices.Concat(joined[:6], []turn{
			{
				0, changed(slotOf(1, "b", 0), func(s *nodeSlot) { s.JobEnd = &jobEnd{Node: 1, Code: 7, Text: "enough"} }),
				[]string{"end the job with 7: the job has ended with code 7 at " +
					time.Time{}.Local().Format("2006-01-02 15:04:05") + ", as reported by node 1 (host , pid 0): enough"},
			},
		}), 7, "enough", false},
		{"declared lost wrongly at the start", nil, slices.Concat(joined[:6], []turn{
			{0, lostSlot(0, "a", 0), []string{"joinEpoch"}},
			{0, ready{slot: slotOf(0, "a", 0)}, nil},
			joined[6],
		}), 0, "", true},
		{"its slot is taken at the start", nil, slices.Concat(joined[:6], []turn{
			{0, slotOf(0, "x", 0), []string{"print node 0 (host h, pid 10) has replaced the agent on host h with pid 10"}},
		}), 1, "its node slot was taken", false},
		{"the epoch begins without this agent", func(c *Config) { c.RestartsMax = 1 }, slices.Concat(joined[:6], []turn{
			{0, membersOf(0, "x", "b"), []string{"joinEpoch"}},
			{0, ready{slot: slotOf(0, "a", 1)}, nil},
			{0, slotOf(1, "b", 1), []string{"propose members/1"}},
			{0, membersOf(1, "x", "b"), []string{
				"end the job with 1: the job continues without node 0 (host h, pid 10), which was declared lost",
			}},
		}), 1, "continues without node 0", false},
		{"a worker fails", nil, slices.Concat(joined, []turn{
			{time.Second, exitOf(0, "signal"), []string{
				"publish the failure of 0: signal of a worker; last seen in step 7", "publish stop/0", "gatherRecords",
			}},
			{0, gathered{}, []string{"publish end/0/0"}},
			{time.Second, tick{}, []string{"stopWorkers"}},
			{0, &nodeEnd{Node: 1}, []string{
				"releaseWorkers", "print that worker 0 failed",
				"end the job with 3: worker 0 of 2, node 0, host h, pid 100: signal of a worker",
			}},
		}), 3, "", false},
		{"a worker of another node fails, and this one does not exit", nil, slices.Concat(joined, []turn{
			{time.Second, &epochStop{Worker: 1}, nil},
			{time.Second, tick{}, []string{"stopWorkers"}},
			{15 * time.Second, tick{}, []string{"killWorkers"}},
			{0, exitOf(0, "interrupted"), gather},
			{0, gathered{}, []string{"publish end/0/0"}},
			{time.Second, &nodeEnd{Node: 1, Failures: []failureReport{{Record: failure.Record{
				Worker: 1, Kind: "panic",
				ExitCode: 2,
			}}}}, []string{
				"releaseWorkers", "print that worker 1 failed", "end the job with 2: worker 1 of 2, node 1: ",
			}},
		}), 2, "", false},
		{"a failure of an earlier epoch", nil, slices.Concat(joined, []turn{
			{0, &nodeEnd{ofEpoch: ofEpoch{4}, Node: 1}, nil},
			{0, &epochStop{ofEpoch{4}, 1}, nil},
			{time.Hour, tick{}, nil},
		}), 0, "", true},
		{
			"a node is lost, and its agent's replacement is awaited", func(c *Config) { c.RestartsMax = 1 },
			slices.Concat(joined, []turn{
				{time.Second, lostSlot(1, "b", 0), []string{
					"print node 1 (host h, pid 11) is lost, and its workers with it: no heartbeat for 30s",
				}},
				{time.Second, tick{}, []string{"stopWorkers"}},
				{0, exitOf(0, "interrupted"), gather},
				{0, gathered{}, []string{
					"publish end/0/0", "releaseWorkers", "print that worker 1 failed",
					"print waiting 1s before the restart: the workers made no progress", "pause for 1s",
				}},
				{time.Second, waited{}, []string{"print node 1 (host h, pid 11) is lost: no heartbeat for 30s; waiting up to " +
					"1m0s for another agent with --node-rank 1", "joinEpoch"}},
				{0, ready{slot: slotOf(0, "a", 1)}, nil},
				{0, slotOf(1, "c", 1), []string{
					"print node 1 (host h, pid 11) has replaced the agent on host h with pid 11", "propose members/1",
				}},
				{0, membersOf(1, "a", "c"), []string{"print starting all 2 workers again: restart 1 of 1", "startWorkers"}},
			}), 0, "", true,
		},
		{"a node is lost before its workers are started", nil, slices.Concat(joined[:7], []turn{
			{0, lostSlot(1, "b", 0), []string{"print node 1 (host h, pid 11) is lost: no heartbeat for 30s; waiting up to " +
				"1m0s for another agent with --node-rank 1"}},
			{0, membersOf(0, "a", "b"), []string{"startWorkers", "readSlots"}},
			{0, launched{}, nil},
			{0, listed{[]*nodeSlot{slotOf(0, "a", 0), lostSlot(1, "b", 0)}}, []string{
				"print node 1 (host h, pid 11) is lost, and its workers with it: no heartbeat for 30s",
			}},
		}), 0, "", true},
		{"a node does not respond", nil, slices.Concat(joined, []turn{
			{time.Second, exitOf(0, "panic"), []string{"publish stop/0", "gatherRecords"}},
			{0, gathered{}, []string{"publish end/0/0"}},
			{26 * time.Second, tick{}, []string{"stopWorkers", "probeStore"}},
			{0, probed{}, []string{
				"releaseWorkers", "print that worker 0 failed",
				"end the job with 3: worker 0 of 2, node 0, host h, pid 100: panic of a worker",
			}},
		}), 3, "", false},
		{"no node responds, since this one is cut off", nil, slices.Concat(joined, []turn{
			{time.Second, exitOf(0, "lost"), []string{"publish stop/0", "gatherRecords"}},
			{0, gathered{}, []string{"publish end/0/0"}},
			{26 * time.Second, tick{}, []string{"stopWorkers", "probeStore"}},
			{0, probed{err: cut}, []string{
				"print node 0 (host h, pid 10) cannot reach the other nodes, and ends its workers: " + cut.Error(),
				"releaseWorkers",
			}},
		}), 1, "cannot reach the rendezvous store", false},
		{"cut off, and back", func(c *Config) { c.RestartsMax = 2 }, slices.Concat(joined, []turn{
			{time.Second, storeLost{cut}, []string{
				"print node 0 (host h, pid 10) cannot reach the other nodes, and ends its workers: " + cut.Error(),
				"stopWorkers",
			}},
			{0, exitOf(0, "interrupted"), gather},
			{0, gathered{}, []string{
				"publish end/0/0", "releaseWorkers", "print node 0 waits up to 1m0s to reach the other nodes again", "awaitStore",
			}},
			{time.Second, waited{}, []string{
				"publish stop/0", "publish end/0/0", "print node 0 reaches the other nodes again", "joinEpoch",
			}},
		}), 0, "", true},
		{"cut off for too long", func(c *Config) { c.RestartsMax = 2 }, slices.Concat(joined, []turn{
			{time.Second, storeLost{cut}, []string{
				"print node 0 (host h, pid 10) cannot reach the other nodes, and ends its workers: " + cut.Error(),
				"stopWorkers",
			}},
			{0, exitOf(0, "interrupted"), gather},
			{0, gathered{}, []string{
				"publish end/0/0", "releaseWorkers", "print node 0 waits up to 1m0s to reach the other nodes again", "awaitStore",
			}},
			{time.Minute, waited{stoppable{err: cut}}, nil},
		}), 1, "cannot reach the rendezvous store", false},
		{"the store is lost after a normal exit, and back", nil, slices.Concat(joined, []turn{
			{time.Second, exitOf(0, ""), gather},
			{0, gathered{}, []string{"publish end/0/0"}},
			{time.Second, storeLost{cut}, nil},
			{30 * time.Second, storeBack{}, nil},
			{time.Hour, tick{}, nil},
		}), 0, "", true},
		{"the store is lost after a normal exit", nil, slices.Concat(joined, []turn{
			{time.Second, exitOf(0, ""), gather},
			{0, gathered{}, []string{"publish end/0/0"}},
			{time.Second, storeLost{cut}, nil},
			{time.Minute, tick{}, []string{"probeStore"}},
			{0, probed{err: cut}, []string{
				"print node 0 (host h, pid 10) cannot reach the other nodes, and ends its workers: " + cut.Error(),
				"releaseWorkers",
			}},
		}), 1, "cannot reach the rendezvous store", false},
		{"its slot is taken as its workers run", nil, slices.Concat(joined, []turn{
			{0, slotOf(0, "x", 0), []string{"stopWorkers"}},
			{0, exitOf(0, "interrupted"), gather},
			{0, gathered{}, []string{"publish end/0/0", "releaseWorkers"}},
		}), 1, "its node slot was taken", false},
		{"the user interrupts, twice", nil, slices.Concat(joined, []turn{
			{0, signalled{sigInterrupt}, []string{
				"print forwarded SIGINT to the workers, which may finish their step; a second signal kills them",
				"publish interrupt/0", "signal SIGINT",
			}},
			{time.Second, signalled{sigInterrupt}, []string{"publish kill/0", "killWorkers"}},
			{0, exitOf(0, "interrupted"), gather},
			{0, gathered{}, []string{"publish end/0/0"}},
			{10 * time.Second, tick{}, []string{"probeStore"}},
			{0, probed{}, []string{"releaseWorkers", "print that worker 1 failed", "end the job with 1: the user ended it"}},
		}), 1, "", false},
		{"the user interrupts another node", nil, slices.Concat(joined, []turn{
			{0, &interruption{Node: 1}, []string{"signal SIGINT"}},
			{0, exitOf(0, "interrupted"), gather},
			{0, gathered{}, []string{"publish end/0/0"}},
			{0, &nodeEnd{Node: 1}, []string{"releaseWorkers", "end the job with 130: the user ended it"}},
		}), 130, "", false},
		{"a worker is stopped", nil, slices.Concat(joined, []turn{
			{0, stopsSeen{map[int]int{0: 100}}, []string{
				"print worker 0 (pid 100) is stopped: resume it with kill -CONT 100; it counts as failed after 30s",
			}},
			{29 * time.Second, stopsSeen{map[int]int{}}, nil}, // it was continued
			{time.Second, stopsSeen{map[int]int{0: 100}}, []string{
				"print worker 0 (pid 100) is stopped: resume it with kill -CONT 100; it counts as failed after 30s",
			}},
			{29 * time.Second, stopsSeen{map[int]int{0: 100}}, nil},
			{time.Second, stopsSeen{map[int]int{0: 100}}, []string{"halt 0"}},
			{0, halted(exitOf(0, "signal")), []string{
				"publish the failure of 0: signal of a worker; last seen in step 7", "publish stop/0",
			}},
		}), 0, "", true},
		{"the context of Run ends", nil, slices.Concat(joined, []turn{
			{0, canceled{context.Canceled}, []string{"killWorkers"}},
			{0, exitOf(0, "interrupted"), gather},
			{0, gathered{}, []string{"publish end/0/0"}},
			{0, &nodeEnd{Node: 1}, []string{
				"releaseWorkers", "print that worker 0 failed",
				"end the job with 3: worker 0 of 2, node 0, host h, pid 100: interrupted of a worker",
			}},
		}), 3, "", false},
		{"the workers cannot be started", nil, slices.Concat(joined[:8], []turn{
			{0, launched{errors.New("no folder")}, []string{"end the job with 1: no folder"}},
		}), 1, "no folder", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, err := Config{
				Command: []string{"x"}, Workers: 1, Nodes: 2, Store: rendezvous.NewMemory().Open(), ID: "j",
				RendezvousTimeout: time.Minute,
			}.filled()
			if err != nil {
				t.Fatal(err)
			}
			if c.change != nil {
				c.change(&cfg)
			}
			s := state{
				cfg: &cfg, nonce: "a", delays: restartDelays{first: cfg.RestartDelay, furthest: -1},
				mine: registration{Host: "h", PID: 10, Workers: 1, Ports: []int{0}, RestartsMax: cfg.RestartsMax},
			}
			now := time.Unix(1_000_000, 0)
			for i, turn := range c.turns {
				now = now.Add(turn.after)
				if _, is := turn.in.(tick); is && len(turn.want) > 0 && s.deadline().IsZero() {
					t.Errorf("turn %d: no deadline", i)
				}
				if x, is := turn.in.(exited); is {
					x.Time = now
					turn.in = x
				}
				before, again := s, s
				before.slots, before.epoch.ends = slices.Clone(s.slots), maps.Clone(s.epoch.ends)
				before.epoch.losses, before.epoch.exits = maps.Clone(s.epoch.losses), slices.Clone(s.epoch.exits)
				before.epoch.running = slices.Clone(s.epoch.running)
				next, actions := decide(s, now, turn.in)
				if !reflect.DeepEqual(s, before) {
					t.Errorf("turn %d has changed the state before it", i)
				}
				if _, same := decide(again, now, turn.in); !reflect.DeepEqual(actions, same) {
					t.Errorf("turn %d: decided %v, and then %v", i, actions, same)
				}
				s = next
				var got []string
				for _, a := range actions {
					got = append(got, text(a))
				}
				if !slices.Equal(got, turn.want) {
					t.Fatalf("turn %d, %T: got\n%s\nwant\n%s", i, turn.in, strings.Join(got, "\n"), strings.Join(turn.want, "\n"))
				}
			}
			switch {
			case c.runs != (s.result == nil):
				t.Fatalf("result %+v", s.result)
			case c.runs:
			case s.result.Code != c.code || (s.result.err == nil) != (c.err == "") ||
				c.err != "" && !strings.Contains(s.result.err.Error(), c.err):
				t.Errorf("result %+v", s.result)
			}
		})
	}
}
