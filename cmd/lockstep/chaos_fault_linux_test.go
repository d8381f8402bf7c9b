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
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// The kinds of faults, and the phases of a step that they come in.
const (
	faultKill = "kill -9"
	faultStop = "kill -STOP"
	faultCut  = "cut link"
	faultDisk = "full disk"

	phaseWrite = "snapshot write" // not told by the trainer: seen on the disk
)

var (
	faultKinds  = []string{faultKill, faultStop, faultCut, faultDisk}
	faultPhases = []string{"rendezvous", "compute", "reduce", "packs", "apply", "snapshot", phaseWrite}
)

// fault befalls a worker once: the first time that it is at this phase of this step or of a later one.
type fault struct {
	Kind   string
	Worker int
	Peer   int // with faultCut
	Step   int64
	Phase  string
	Skip   int           // times that the phase is passed first
	Delay  time.Duration // after that
}

func (f fault) String() string {
	out := fmt.Sprintf("%s of worker %d", f.Kind, f.Worker)
	if f.Kind == faultCut {
		out += fmt.Sprintf(" from worker %d", f.Peer)
	}
	return out + fmt.Sprintf(" in step %d, %s, %d times later and after %v", f.Step, f.Phase, f.Skip, f.Delay)
}

// drawFaults draws the faults of a run. As many runs as there are pairs of kind and phase, with seeds that follow
// one another, have them all.
func drawFaults(seed uint64) []fault {
	g := rand.New(rand.NewPCG(seed, 0))
	first := drawFault(g, faultKinds[seed%uint64(len(faultKinds))], faultPhases[seed%uint64(len(faultPhases))])
	all := []fault{first}
	for g.IntN(3) == 0 && len(all) < 2 && first.Kind != faultCut { // sometimes it strikes twice
		all = append(all, drawFault(g, []string{faultKill, faultStop, faultDisk}[g.IntN(3)], faultPhases[g.IntN(len(faultPhases))]))
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
	case "packs", "apply":
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

// chaosPlan is what the processes of a run are told.
type chaosPlan struct {
	Folder    string // for marks
	Snapshots string
	Faults    []fault
}

// planVariable holds a [chaosPlan] as JSON. What has it in its environment belongs to a run.
const planVariable = "LOCKSTEP_TEST_CHAOS"

// mark is what a process writes down just before it strikes.
type mark struct {
	Epoch  string
	Newest string // of the snapshots
}

func (p *chaosPlan) markFile(i int) string {
	return filepath.Join(p.Folder, fmt.Sprintf("struck-%d", i))
}

// struck returns the mark of a fault that has come.
func (p *chaosPlan) struck(i int) (at mark, ok bool) {
	text, err := os.ReadFile(p.markFile(i))
	if errors.Is(err, fs.ErrNotExist) {
		return at, false
	}
	if err == nil {
		err = json.Unmarshal(text, &at)
	}
	if err != nil {
		panic(err) // a mark is there whole, or not at all
	}
	return at, true
}

func (p *chaosPlan) ballast() string { return filepath.Join(p.Snapshots, "ballast") }

// misfortune is the part of a plan that concerns this process.
type misfortune struct {
	chaosPlan
	worker int

	mu      sync.Mutex
	passed  map[int]int // of each fault's phase
	started map[int]bool
}

// expectMisfortune has befall this process what a test has planned for it, if anything.
func expectMisfortune() {
	text := os.Getenv(planVariable)
	worker := 0
	if _, err := fmt.Sscan(os.Getenv(cluster.EnvWorker), &worker); err != nil || text == "" {
		return
	}
	m := &misfortune{worker: worker, passed: map[int]int{}, started: map[int]bool{}}
	if err := json.Unmarshal([]byte(text), &m.chaosPlan); err != nil {
		panic(err)
	}
	onProgress = m.at
}

// at strikes if it is time.
func (m *misfortune) at(step int64, phase string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if phase == "rendezvous" && os.Getenv(cluster.EnvEpoch) != "0" && m.worker == 0 {
		if err := os.Remove(m.ballast()); err != nil && !errors.Is(err, fs.ErrNotExist) { // there is room again
			panic(err)
		}
	}
	for i, f := range m.Faults {
		if at, ok := m.struck(i); ok && at.Epoch == os.Getenv(cluster.EnvEpoch) {
			return // what comes next comes after the restart
		} else if ok {
			continue
		}
		if m.comes(i, f, step, phase) {
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

func (m *misfortune) comes(i int, f fault, step int64, phase string) bool {
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

// later strikes after the fault's delay or, in a snapshot's write, as long after that has begun.
func (m *misfortune) later(i int, f fault) {
	before, _ := checkpoint.List(m.Snapshots)
	for f.Phase == phaseWrite {
		if begun, _ := filepath.Glob(filepath.Join(m.Snapshots, ".snapshot-*")); len(begun) > 0 {
			break
		}
		if now, _ := checkpoint.List(m.Snapshots); len(now) > 0 && (len(before) == 0 || now[len(now)-1] != before[len(before)-1]) {
			break
		}
		time.Sleep(50 * time.Microsecond)
	}
	time.Sleep(f.Delay)
	m.strike(i, f)
}

func (m *misfortune) strike(i int, f fault) {
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

// hostAddress is the address of a worker that has a network namespace of its own.
func hostAddress(worker int) string { return fmt.Sprintf("10.80.0.%d", worker+1) }

// cutFrom is netfilter's rules that let nothing through to a worker, nor from it.
func cutFrom(peer int) string {
	chain := "chain %s {\n type filter hook %s priority 0\n ip %s %s drop\n }\n"
	return "table inet chaos {\n" + fmt.Sprintf(chain, "in", "input", "saddr", hostAddress(peer)) + fmt.Sprintf(chain, "out", "output", "daddr", hostAddress(peer)) + "}\n"
}

// netfilter has nft read rules, in the network namespace of a process if there is one, else in this process's.
func netfilter(rules string, in ...string) error {
	args := append(in, "nft", "-f", "-")
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", args, err, out)
	}
	return nil
}

// lines are what processes write, of several at once.
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
