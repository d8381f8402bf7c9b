package secret_test

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// cable joins two workers' network namespaces: a veth pair, on which rate, if given, limits each direction by a token
// bucket ("1gbit").
type cable struct{ rate string }

// hosts starts two workers, each in a separate network namespace, joined by a cable. The namespaces have no name: they
// end with the processes, even if the test fails.
func hosts(t testing.TB, s secret.Secret, encrypt bool, c cable) []*process {
	t.Helper()
	probe(t, strings.Fields("ip link set lo up"))
	if c.rate != "" {
		probe(t, c.shape("lo"))
	}
	var all []*process
	for r := range 2 {
		device := fmt.Sprintf("lockstep%d", r)
		network := [][]string{
			{"ip", "link", "set", "lo", "up"},
			{"ip", "address", "add", fmt.Sprintf("10.77.0.%d/24", 1+r), "dev", device},
			{"ip", "link", "set", device, "up"},
		}
		if c.rate != "" {
			network = append(network, c.shape(device))
		}
		w := worker{
			Rank: r, Size: 2, Secret: s.Text(), Encrypt: encrypt, Listen: fmt.Sprintf("10.77.0.%d:0", 1+r),
			Network: network,
		}
		all = append(all, start(t, w, func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		}))
	}
	pid := func(r int) string { return fmt.Sprint(all[r].cmd.Process.Pid) }
	args := strings.Fields("link add lockstep0 netns " + pid(0) + " type veth peer name lockstep1 netns " + pid(1))
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Skipf("no veth pair can be made here: %v: %s", err, out)
	}
	for _, p := range all {
		fmt.Fprintln(p.in, "the network is ready")
	}
	joinAll(t, all)
	return all
}

// shape is the command that limits a device's rate.
func (c cable) shape(device string) []string {
	return strings.Fields("tc qdisc add dev " + device + " root tbf rate " + c.rate + " burst 128kb latency 20ms")
}

// probe skips the test unless the command works in a new network namespace.
func probe(t testing.TB, command []string) {
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("needs root, network namespaces and iproute2: %s: %v: %s", strings.Join(command, " "), err,
			out)
	}
}

// TestNamespaces: two hosts, from the network's point of view, get the bits of one process, over TLS and in plain text.
func TestNamespaces(t *testing.T) {
	s := secret.New()
	want := trained(t, 2, 20)
	for name, encrypt := range map[string]bool{"TLS": true, "plain text": false} {
		t.Run(name, func(t *testing.T) {
			all := hosts(t, s, encrypt, cable{})
			for r, got := range ask(t, all, "train 20") {
				if got != want {
					t.Errorf("rank %d has %s, want %s", r, got, want)
				}
			}
			sent := ask(t, all, "tapes")
			f := strings.Fields(sent[1]) // rank 1 dials
			for i := 0; i+1 < len(f); i += 2 {
				asked := f[i+1][2*secureAt:][:2] == "01"
				hello := strings.HasPrefix(f[i+1][2*(helloBytes+2*32):], "1603") // after a nonce and a proof
				if asked != encrypt || hello != encrypt || !strings.HasPrefix(f[i], "10.77.0.1:") {
					t.Errorf("the connection to %s is %s", f[i], f[i+1])
				}
			}
			if len(f) == 0 {
				t.Error("no connection was dialed")
			}
			ask(t, all, "leave")
		})
	}
}

// TestLineRate: an all-reduce over a line of 1 Gbit/s takes the time in which the line transfers its bytes. Each of two
// ranks sends and receives as many as the vector has. The best of many runs is compared with the line's rate; if a bare
// exchange of the same bytes at the same time cannot fill the line either, because the machine is busy, the test is
// skipped.
func TestLineRate(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: 16 MiB at 1 Gbit/s take seconds, and a rate under the race detector says nothing; the README's " +
			"command runs it")
	}
	const bytes, rate, want, tries = 16 << 20, 1e9 / 8, 90, 12
	s := secret.New()
	for name, encrypt := range map[string]bool{"TLS": true, "plain text": false} {
		t.Run(name, func(t *testing.T) {
			all := hosts(t, s, encrypt, cable{rate: "1gbit"})
			shares := func(what string, times int) (out []float64) { // in percent
				for _, seconds := range timed(t, all, what, bytes, times) {
					out = append(out, 100*bytes/seconds/rate)
				}
				return out
			}
			var ours, bare []float64
			for try := 0; try < tries && (try == 0 || slices.Max(ours) < want); try++ {
				ours = append(ours, shares("reduce", 9)...)
				bare = append(bare, shares("bare", 3)...)
			}
			slices.Sort(ours)
			slices.Sort(bare)
			result := fmt.Sprintf("%d MiB at 1 Gbit/s: %.1f %% of the line's rate (median of %d), at best %.1f %%; a bare "+
				"exchange %.1f %% and %.1f %%", bytes>>20,
				ours[len(ours)/2], len(ours), slices.Max(ours), bare[len(bare)/2], slices.Max(bare))
			switch {
			case slices.Max(ours) >= want:
				t.Log(result)
			case bare[len(bare)/2] < want:
				t.Skipf("this machine is too busy to fill the line: %s", result)
			default:
				t.Errorf("%s; want %d %% at best", result, want)
			}
			ask(t, all, "leave")
		})
	}
}

// BenchmarkCable times an all-reduce of two hosts over cables of 1 and 10 Gbit/s, encrypted and not.
func BenchmarkCable(b *testing.B) {
	for _, rate := range []string{"1gbit", "10gbit"} {
		for _, bytes := range []int{1 << 20, 16 << 20} {
			for _, name := range []string{"plain", "tls"} {
				b.Run(fmt.Sprintf("%s/%s/%d", rate, name, bytes), func(b *testing.B) {
					benchmarkReduce(b, hosts(b, secret.New(), name == "tls", cable{rate: rate}), bytes)
				})
			}
		}
	}
}
