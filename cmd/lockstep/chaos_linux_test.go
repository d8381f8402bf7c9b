package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

var (
	chaosRuns = flag.Int("runs", 4, "runs of TestChaos: 28 or more have each fault in each phase")
	chaosSeed = flag.Uint64("seed", 0, "seed of the first run of TestChaos; those of the others follow (default: "+
		"another each time)")
)

const (
	chaosWorkers = 3
	chaosSteps   = 8
	// A full disk holds a few snapshots.
	chaosDisk = "24m"
	// chaosCut is how long a link stays cut: longer than the workers need to detect it, shorter than agents wait for
	// each other.
	chaosCut = 11 * time.Second
	// chaosWait bounds a run. Only a test that hangs reaches it.
	chaosWait = 8 * time.Minute
)

// chaosTraining is the training: several buckets, and a snapshot after every second step.
var chaosTraining = []string{
	"train", "--model", "mlp", "--hidden", "64,64", "--global-batch", "24", "--steps", fmt.Sprint(chaosSteps),
	"--bucket-bytes", "1", "--progress", "none",
}

// TestChaos injects any fault into one of three workers, in any phase of a step. lockstep run names the worker and
// restarts the job, which ends with the weights of an uninterrupted training. No snapshot is lost, and nothing is left
// behind.
func TestChaos(t *testing.T) {
	seed, runs := *chaosSeed, *chaosRuns
	if seed == 0 {
		seed = rand.Uint64N(1 << 40)
	}
	if testing.Short() {
		runs = min(runs, 1)
		for *chaosSeed == 0 && drawFaults(seed)[0].Kind != faultKill {
			seed++
		}
		t.Logf("-short: %d run only, with a killed worker, which takes the least time", runs)
	}
	host := chaosHost(t)
	want := chaosUninterrupted(t)
	for i := range runs {
		seed := seed + uint64(i)
		faults := drawFaults(seed)
		t.Run(fmt.Sprintf("%d %s in %s", seed, faults[0].Kind, faults[0].Phase), func(t *testing.T) {
			t.Parallel()
			if !host && (faults[0].Kind == faultCut || faults[0].Kind == faultDisk) {
				t.Skip("needs root, unshare, and iproute2 and nftables for links")
			}
			r := newChaosRun(t, faults, host)
			began := time.Now()
			r.start()
			r.check(want)
			t.Logf("%v: %d restarts, %v", faults, len(r.blocks), time.Since(began).Round(100*time.Millisecond))
			for i, block := range r.blocks {
				t.Logf("restart %d: worker %s", i+1, block)
			}
			if t.Failed() {
				t.Logf("go test ./cmd/lockstep -run TestChaos -seed %d -runs 1 repeats it. Output:\n%s", seed, r.output())
			}
		})
	}
}

// chaosHost reports whether processes can have separate networks, disks and firewalls here.
func chaosHost(t *testing.T) bool {
	try := exec.Command("unshare", "-n", "-m", "sh", "-c",
		`mount -t tmpfs none /dev/shm && ip link add cable0 type veth peer name cable1 && nft -f -`)
	try.Stdin = strings.NewReader(cutFrom(0))
	out, err := try.CombinedOutput()
	if err != nil {
		t.Logf("separate hosts are not possible: %v: %s", err, out)
	}
	return err == nil
}

// chaosUninterrupted trains in one process, and returns the weights' hash.
func chaosUninterrupted(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "summary.json")
	if out, err := clitest.Process(t, append(chaosTraining[:len(chaosTraining):len(chaosTraining)], "--replicas",
		fmt.Sprint(chaosWorkers), "--summary", file)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return summaryHash(t, file)
}

// chaosRun is one job, and the hosts that it runs on.
type chaosRun struct {
	t       *testing.T
	plan    chaosPlan
	text    string // the plan, which identifies the processes of this run
	dir     string
	hosted  bool // it runs on separate hosts
	hosts   []*exec.Cmd
	outputs []*lines // by host
	blocks  []string // failure reports of lockstep run, by epoch
}

func newChaosRun(t *testing.T, faults []fault, hosted bool) *chaosRun {
	t.Helper()
	dir := t.TempDir()
	r := &chaosRun{
		t: t, dir: dir, hosted: hosted,
		plan: chaosPlan{Folder: filepath.Join(dir, "marks"), Snapshots: filepath.Join(dir, "snapshots"), Faults: faults},
	}
	for _, name := range []string{"marks", "snapshots", "kept", "temporary", "left"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(r.plan)
	if err != nil {
		t.Fatal(err)
	}
	r.text = string(text)
	return r
}

func (r *chaosRun) output() string {
	var b strings.Builder
	for i, l := range r.outputs {
		fmt.Fprintf(&b, "host %d:\n%s\n", i, l)
	}
	return b.String()
}

// command returns lockstep run on one of the hosts.
func (r *chaosRun) command(host, hosts int) []string {
	exe, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	run := []string{
		exe, "run", "--max-restarts", "3", "--grace", "1s", "--nproc-per-node",
		fmt.Sprint(chaosWorkers / hosts),
	}
	train := []string{
		"--strategy", "multi-worker", "--replicas", "1", "--heartbeat-timeout", "4s", "--rdzv-timeout", "30s",
		"--summary", filepath.Join(r.dir, "summary.json"), "--checkpoint-dir", r.plan.Snapshots, "--save-every", "2",
	}
	if hosts > 1 {
		run = append(run, "--nnodes", fmt.Sprint(hosts), "--node-rank", fmt.Sprint(host), "--rdzv-endpoint",
			hostAddress(0)+":29400")
	}
	run = append(run, "--", exe)
	return append(append(run, chaosTraining...), train...)
}

// onHost is a shell script that gives its process a separate network, shared memory and disk for snapshots. After the
// command it lists the files that the command left there.
const onHost = `set -e
mount -t tmpfs -o size=` + chaosDisk + ` none "$SNAPSHOTS"
mount -t tmpfs none /dev/shm
ip link set lo up
read go
if [ -n "$ADDRESS" ]; then
	ip address add "$ADDRESS/24" dev "$DEVICE"
fi
set +e
"$@"
code=$?
ports() { cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep ' 0A '; }
sockets() { tail -n +2 /proc/net/unix; }
memory() { ls -A /dev/shm; }
for what in ports sockets memory; do
	# The system closes a socket that still has data to send a moment after its process has ended.
	for try in $(seq 100); do
		$what >"$LEFT.$what"
		[ -s "$LEFT.$what" ] || break
		sleep 0.1
	done
done
if [ -n "$KEPT" ]; then cp -a "$SNAPSHOTS/." "$KEPT"; fi
exit $code
`

// start runs the job to its end.
func (r *chaosRun) start() {
	t := r.t
	hosts := 1
	if r.plan.Faults[0].Kind == faultCut {
		hosts = chaosWorkers
	}
	ctx, cancel := context.WithTimeout(t.Context(), chaosWait)
	defer cancel()
	key := secret.New().Text()
	var ready []io.WriteCloser
	for i := range hosts {
		args := r.command(i, hosts)
		env := append(os.Environ(), clitest.AsCommand+"=1", planVariable+"="+r.text, "TMPDIR="+filepath.Join(r.dir,
			"temporary"))
		if hosts > 1 {
			env = append(env, "LOCKSTEP_SECRET="+key)
		}
		if r.hosted {
			args = append([]string{"unshare", "-n", "-m", "sh", "-c", onHost, "sh"}, args...)
			env = append(env, "SNAPSHOTS="+r.plan.Snapshots, fmt.Sprintf("LEFT=%s/left/%d", r.dir, i))
			if hosts > 1 {
				env = append(env, "ADDRESS="+hostAddress(i), "DEVICE="+hostDevice(i))
			}
			if i == 0 {
				env = append(env, "KEPT="+filepath.Join(r.dir, "kept"))
			}
		}
		cmd, out := exec.CommandContext(ctx, args[0], args[1:]...), &lines{}
		cmd.Env, cmd.Stdout, cmd.Stderr = env, out, out
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.WaitDelay = 10 * time.Second // for processes that are left and hold its outputs
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		in, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		r.hosts, r.outputs, ready = append(r.hosts, cmd), append(r.outputs, out), append(ready, in)
	}
	if hosts > 1 {
		r.network()
	}
	for _, in := range ready {
		_, _ = io.WriteString(in, "go\n") // without a separate host it reads nothing
		in.Close()
	}
	healed, healing := make(chan struct{}), make(chan struct{})
	go func() { defer close(healed); r.heal(healing) }()
	for i, cmd := range r.hosts {
		if err := cmd.Wait(); err != nil {
			t.Errorf("host %d: %v", i, err)
		}
	}
	close(healing)
	<-healed
}

// hostDevice is the network device of a host. That of the first host is a bridge, which connects the others.
func hostDevice(host int) string {
	if host == 0 {
		return "bridge"
	}
	return "cable"
}

// network connects the hosts by virtual cables.
func (r *chaosRun) network() {
	pid := func(i int) string { return fmt.Sprint(r.hosts[i].Process.Pid) }
	for _, cmd := range r.hosts {
		for range 1000 { // until it is in its namespace
			own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
			if mine, _ := os.Readlink("/proc/self/ns/net"); err == nil && own != mine {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	in := func(host int, command string) string { return "nsenter -t " + pid(host) + " -n " + command }
	commands := []string{in(0, "ip link add bridge type bridge"), in(0, "ip link set bridge up")}
	for i := 1; i < len(r.hosts); i++ {
		end := fmt.Sprintf("cable%d", i)
		commands = append(commands,
			"ip link add "+end+" netns "+pid(0)+" type veth peer name cable netns "+pid(i),
			in(0, "ip link set "+end+" master bridge up"), in(i, "ip link set cable up"))
	}
	for _, c := range commands {
		f := strings.Fields(c)
		if out, err := exec.Command(f[0], f[1:]...).CombinedOutput(); err != nil {
			r.t.Errorf("%s: %v: %s", c, err, out)
		}
	}
}

// heal restores the cut link after a while.
func (r *chaosRun) heal(done <-chan struct{}) {
	if r.plan.Faults[0].Kind != faultCut {
		return
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	cut, mended := time.Time{}, false
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		switch _, err := os.Stat(r.plan.markFile(0)); {
		case err != nil || mended:
		case cut.IsZero():
			cut = time.Now()
		case r.mayMend(time.Since(cut)):
			mended = true
			worker := r.plan.Faults[0].Worker
			if err := netfilter("delete table inet chaos\n", "nsenter", "-t", fmt.Sprint(r.hosts[worker].Process.Pid),
				"-n"); err != nil {
				r.t.Error(err)
			}
		}
	}
}

// mayMend reports whether a link that has been cut for this time may be restored: a link to the host of the rendezvous
// before the agents give up, another link when its failure has been detected.
func (r *chaosRun) mayMend(since time.Duration) bool {
	f := r.plan.Faults[0]
	if f.Worker == 0 || f.Peer == 0 {
		return since > chaosCut
	}
	return strings.Contains(r.outputs[0].String(), failedLine) || since > 8*chaosCut
}

const failedLine = "lockstep run: the job failed; root cause: worker "

// check checks the result of the job, and what it left behind.
func (r *chaosRun) check(want string) {
	t := r.t
	if got := summaryHash(t, filepath.Join(r.dir, "summary.json")); got != want {
		t.Errorf("weights hash %s, want %s", got, want)
	}
	out := r.outputs[0].String()
	r.blocks = strings.Split(out, failedLine)
	begun := r.blocks[0]
	r.blocks = r.blocks[1:]
	for i, f := range r.plan.Faults {
		at, ok := r.plan.struck(i)
		if !ok {
			if i == 0 {
				t.Errorf("the fault was not injected: %v", f)
			}
			continue
		}
		epoch, err := strconv.Atoi(at.Epoch)
		if err != nil {
			t.Error(err)
		}
		r.checkBlock(f, epoch)
		r.checkResumed(append([]string{begun}, r.blocks...), epoch, at.Newest)
	}
	r.checkSnapshots()
	r.checkLeft()
}

// checkBlock checks that the failure report names the worker with the fault.
func (r *chaosRun) checkBlock(f fault, epoch int) {
	t := r.t
	if epoch >= len(r.blocks) {
		switch {
		case f.Kind == faultCut && f.Phase == "rendezvous", f.Kind == faultDisk && f.Phase == phaseWrite:
			t.Logf("no worker detected %v", f) // the workers joined after the link was restored; the last snapshot was written
		case f.Kind == faultDisk && strings.Contains(r.outputs[0].String(), "the disk is full: old snapshots are removed"):
			t.Logf("an old snapshot was removed after %v", f)
		default:
			t.Errorf("no report about %v", f)
		}
		return
	}
	block, _, _ := strings.Cut(r.blocks[epoch], "lockstep run: starting")
	struck, wants := []int{f.Worker}, []string(nil)
	switch f.Kind {
	case faultCut: // either of the two may be detected first; if one is silent, the report names the link
		struck = append(struck, f.Peer)
		for _, end := range struck {
			if end == 0 {
				wants = append(wants, "host cannot be reached")
			} else {
				wants = append(wants, fmt.Sprintf("worker %d", end))
			}
		}
	case faultDisk:
		wants = append(wants, "no space left on device", r.plan.Snapshots)
	case faultStop:
		wants = append(wants, "stopped")
	case faultKill:
		wants = append(wants, "killed")
	}
	for _, want := range wants {
		if !strings.Contains(block, want) {
			t.Errorf("epoch %d, %v: %s%s\nwant %q", epoch, f, failedLine, block, want)
		}
	}
	if !slices.ContainsFunc(struck, func(worker int) bool {
		return strings.HasPrefix(block, fmt.Sprintf("%d\n", worker))
	}) {
		t.Errorf("epoch %d, %v: the root cause is worker %.1s", epoch, f, block)
	}
}

var resumedFrom = regexp.MustCompile(`resumed +from \S*(snapshot-\d+-step-\d+): `)

// checkResumed checks that every restart resumes from the newest snapshot at its time, or a later one.
func (r *chaosRun) checkResumed(starts []string, epoch int, newest string) {
	for i := epoch + 1; i < len(starts); i++ {
		m := resumedFrom.FindStringSubmatch(starts[i])
		switch {
		case m == nil && newest != "" && i == len(starts)-1:
			r.t.Errorf("it started over, although there was %s", newest)
		case m != nil && m[1] < newest: // numbers have as many digits
			r.t.Errorf("it resumed from %s, although there was %s", m[1], newest)
		}
	}
}

// checkSnapshots checks that the kept snapshots are readable, and that the newest is of the last step.
func (r *chaosRun) checkSnapshots() {
	t, dir := r.t, r.plan.Snapshots
	if r.hosted {
		dir = filepath.Join(r.dir, "kept")
	}
	all, err := checkpoint.List(dir)
	if err != nil || len(all) != 3 {
		t.Errorf("the snapshots that were kept are %v, %v", all, err)
	}
	for i, path := range all {
		s, err := checkpoint.ReadSnapshot(path)
		if err != nil || i == len(all)-1 && s.Step != chaosSteps {
			t.Errorf("%s: %+v, %v", path, s, err)
		}
	}
	entries, err := os.ReadDir(dir)
	entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { // the second, if it was not noticed
		return e.Name() == "config.yaml" || e.Name() == filepath.Base(r.plan.ballast())
	})
	if err != nil || len(entries) != len(all) {
		t.Errorf("files other than snapshots: %v, %v", entries, err)
	}
}

// checkLeft checks that no process, port, socket, shared memory or file is left.
func (r *chaosRun) checkLeft() {
	t := r.t
	for try := 0; ; try++ {
		left := processesWith(planVariable + "=" + r.text)
		if len(left) == 0 {
			break
		}
		if try == 500 {
			t.Errorf("these processes are left: %v", left)
			break
		}
		time.Sleep(10 * time.Millisecond) // a killed process exists until its memory is freed
	}
	// The user's folder stays, with the lock of its sockets.
	temporary := filepath.Join(r.dir, "temporary")
	stays := []string{temporary, filepath.Join(temporary, fmt.Sprintf("lockstep-%d", os.Getuid()))}
	stays = append(stays, filepath.Join(stays[1], "jobs"), filepath.Join(stays[1], "jobs", "lock"))
	var files []string
	err := filepath.WalkDir(temporary, func(path string, _ os.DirEntry, err error) error {
		if !slices.Contains(stays, path) {
			files = append(files, path)
		}
		return err
	})
	if err != nil || len(files) > 0 {
		t.Errorf("these files are left: %v, %v", files, err)
	}
	left, err := os.ReadDir(filepath.Join(r.dir, "left"))
	if want := 3 * len(r.hosts); err != nil || r.hosted && len(left) != want {
		t.Errorf("%d files list what is left, %v, want %d", len(left), err, want)
	}
	for _, file := range left {
		if text, err := os.ReadFile(filepath.Join(r.dir, "left", file.Name())); err != nil || len(text) > 0 {
			t.Errorf("%s that are left: %s, %v", file.Name(), text, err)
		}
	}
}

// processesWith returns the processes with the text in their environment.
func processesWith(variable string) (out []string) {
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		env, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err == nil && strings.Contains(string(env), variable) {
			command, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
			out = append(out, filepath.Base(dir)+" "+strings.ReplaceAll(string(command), "\x00", " "))
		}
	}
	return out
}
