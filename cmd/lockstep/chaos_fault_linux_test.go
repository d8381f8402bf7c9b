package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// The kinds of faults, and the phases of a step in which they are injected.
const (
	faultKill = "kill -9"
	faultStop = "kill -STOP"
	faultCut  = "cut link"
	faultDisk = "full disk"

	phaseWrite = "snapshot write" // not reported by the trainer: observed on the disk
)

var (
	faultKinds  = []string{faultKill, faultStop, faultCut, faultDisk}
	faultPhases = []string{"rendezvous", "compute", "reduce", "update", "snapshot", phaseWrite}
)

// fault is injected once: when the worker first reaches the phase in this step or a later one.
type fault struct {
	Kind   string
	Worker int
	Peer   int // with faultCut
	Step   int64
	Phase  string
	Skip   int           // number of times that the phase passes first
	Delay  time.Duration // after that
}

func (f fault) String() string {
	out := fmt.Sprintf("%s of worker %d", f.Kind, f.Worker)
	if f.Kind == faultCut {
		out += fmt.Sprintf(" from worker %d", f.Peer)
	}
	return out + fmt.Sprintf(" in step %d, %s, %d times later and after %v", f.Step, f.Phase, f.Skip, f.Delay)
}

// drawFaults draws the faults of a run. With consecutive seeds, as many runs as there are pairs of kind and phase
// cover all pairs.
func drawFaults(seed uint64) []fault {
	g := rand.New(rand.NewPCG(seed, 0))
	first := drawFault(g, faultKinds[seed%uint64(len(faultKinds))], faultPhases[seed%uint64(len(faultPhases))])
	all := []fault{first}
	for g.IntN(3) == 0 && len(all) < 2 && first.Kind != faultCut { // sometimes two faults
		all = append(all, drawFault(g, []string{faultKill, faultStop, faultDisk}[g.IntN(3)],
			faultPhases[g.IntN(len(faultPhases))]))
	}
	return all
}

func drawFault(g *rand.Rand, kind, phase string) fault {
	f := fault{Kind: kind, Phase: phase, Worker: g.IntN(chaosWorkers), Step: 1 + g.Int64N(chaosSteps-1)}
	switch phase {
	case "rendezvous":
		f.Step, f.Delay = -1, time.Duration(g.Int64N(int64(60*time.Millisecond)))
	case "reduce":
		f.Skip = g.IntN(2)
	case "update":
		f.Skip = g.IntN(4)
	case phaseWrite:
		f.Worker, f.Delay = 0, time.Duration(g.Int64N(int64(3*time.Millisecond)))
	}
	if kind == faultDisk {
		f.Worker = 0
	}
	f.Peer = (f.Worker + 1 + g.IntN(chaosWorkers-1)) % chaosWorkers
	return f
}

// chaosPlan is the plan that the processes of a run receive.
type chaosPlan struct {
	Folder    string // for marks
	Snapshots string
	Faults    []fault
}

// planVariable holds a [chaosPlan] as JSON. All processes with it in their environment belong to a run.
const planVariable = "LOCKSTEP_TEST_CHAOS"

// mark is the record that a process writes just before it injects a fault.
type mark struct {
	Epoch  string
	Newest string // of the snapshots
}

func (p *chaosPlan) markFile(i int) string {
	return filepath.Join(p.Folder, fmt.Sprintf("struck-%d", i))
}

// struck returns the mark of an injected fault.
func (p *chaosPlan) struck(i int) (at mark, ok bool) {
	text, err := os.ReadFile(p.markFile(i))
	if errors.Is(err, fs.ErrNotExist) {
		return at, false
	}
	if err == nil {
		err = json.Unmarshal(text, &at)
	}
	if err != nil {
		panic(err) // marks are written atomically
	}
	return at, true
}

func (p *chaosPlan) ballast() string { return filepath.Join(p.Snapshots, "ballast") }

// injector injects the faults of a plan that concern this process.
type injector struct {
	chaosPlan
	worker int

	mu      sync.Mutex
	passed  map[int]int // of each fault's phase
	started map[int]bool
}

// injectFaults injects the faults that a test has planned for this process, if any.
func injectFaults() {
	text := os.Getenv(planVariable)
	worker := 0
	if _, err := fmt.Sscan(os.Getenv(cluster.EnvWorker), &worker); err != nil || text == "" {
		return
	}
	m := &injector{worker: worker, passed: map[int]int{}, started: map[int]bool{}}
	if err := json.Unmarshal([]byte(text), &m.chaosPlan); err != nil {
		panic(err)
	}
	setup.OnProgress = m.at
}

// at injects the fault that is due, if any.
func (m *injector) at(step int64, phase string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if phase == "rendezvous" && os.Getenv(cluster.EnvEpoch) != "0" && m.worker == 0 {
		if err := os.Remove(m.ballast()); err != nil && !errors.Is(err, fs.ErrNotExist) { // frees the disk
			panic(err)
		}
	}
	for i, f := range m.Faults {
		if at, ok := m.struck(i); ok && at.Epoch == os.Getenv(cluster.EnvEpoch) {
			return // further faults follow after the restart
		} else if ok {
			continue
		}
		if m.isDue(i, f, step, phase) {
			m.started[i] = true
			if f.Phase == phaseWrite || f.Delay > 0 {
				go m.later(i, f)
			} else {
				m.strike(i, f)
			}
		}
		return
	}
}

func (m *injector) isDue(i int, f fault, step int64, phase string) bool {
	want := f.Phase
	if want == phaseWrite {
		want = "snapshot"
	}
	if m.started[i] || f.Worker != m.worker || phase != want || step < f.Step {
		return false
	}
	m.passed[i]++
	return m.passed[i] > f.Skip
}

// later injects a fault after its delay. For a snapshot write, the delay starts with the write.
func (m *injector) later(i int, f fault) {
	before, _ := checkpoint.List(m.Snapshots)
	for f.Phase == phaseWrite {
		if begun, _ := filepath.Glob(filepath.Join(m.Snapshots, ".snapshot-*")); len(begun) > 0 {
			break
		}
		if now, _ := checkpoint.List(m.Snapshots); len(now) > 0 &&
			(len(before) == 0 || now[len(now)-1] != before[len(before)-1]) {
			break
		}
		time.Sleep(50 * time.Microsecond)
	}
	time.Sleep(f.Delay)
	m.strike(i, f)
}

func (m *injector) strike(i int, f fault) {
	all, _ := checkpoint.List(m.Snapshots)
	at := mark{Epoch: os.Getenv(cluster.EnvEpoch)}
	if len(all) > 0 {
		at.Newest = filepath.Base(all[len(all)-1])
	}
	text, err := json.Marshal(at)
	if err == nil {
		err = os.WriteFile(m.markFile(i)+".new", text, 0o600)
	}
	if err == nil {
		err = os.Rename(m.markFile(i)+".new", m.markFile(i))
	}
	if err == nil {
		switch f.Kind {
		case faultKill:
			err = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		case faultStop:
			err = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		case faultDisk:
			err = fill(m.ballast())
		case faultCut:
			err = netfilter(cutFrom(f.Peer))
		}
	}
	if err != nil {
		panic(fmt.Sprintf("chaos: %v: %v", f, err))
	}
}

// fill writes a file until the disk is full.
func fill(file string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = f.Write(block)
	}
	if errors.Is(err, syscall.ENOSPC) {
		return nil
	}
	return err
}

// hostAddress returns the address of a worker in a separate network namespace.
func hostAddress(worker int) string { return fmt.Sprintf("10.80.0.%d", worker+1) }

// cutFrom returns netfilter rules that drop all packets to and from a worker.
func cutFrom(peer int) string {
	chain := "chain %s {\n type filter hook %s priority 0\n ip %s %s drop\n }\n"
	return "table inet chaos {\n" + fmt.Sprintf(chain, "in", "input", "saddr", hostAddress(peer)) +
		fmt.Sprintf(chain, "out", "output", "daddr", hostAddress(peer)) + "}\n"
}

// netfilter makes nft read rules, in the network namespace of a process if one is given, else in that of this process.
func netfilter(rules string, in ...string) error {
	args := append(in, "nft", "-f", "-")
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", args, err, out)
	}
	return nil
}

// lines collects the output of several processes.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
