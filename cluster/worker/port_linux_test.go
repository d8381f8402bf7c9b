package worker_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/freeport"
)

// TestOnePort: a worker listens on one port: if it serves the store, on the store's port, and on no other interface.
func TestOnePort(t *testing.T) {
	t.Parallel()
	store := freeStore(t)
	var all []*process
	for w := range 2 {
		all = append(all, start(t, child{
			Worker: w, Workers: 2, Replicas: 1, Store: store, Job: "port", Steps: 3, At: 1,
			Do: "wait", TCP: true, Secret: strings.Repeat("secret", 6),
		}))
	}
	var at [2][]string
	for w, p := range all {
		p.says(t, "waits")
		at[w] = listens(t, p.cmd.Process.Pid)
	}
	if want := []string{strings.TrimPrefix(store, "tcp://")}; !slices.Equal(at[0], want) {
		t.Errorf("worker 0 listens at %v, want %v", at[0], want)
	}
	if len(at[1]) != 1 || !strings.HasPrefix(at[1][0], "127.0.0.1:") {
		t.Errorf("worker 1 listens at %v, want one port of 127.0.0.1", at[1])
	}
	for _, p := range all {
		if err := p.goOn.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, p := range all {
		p.says(t, "done")
	}
}

// TestListedPorts: a worker listens on the port that TF_CONFIG lists for it, and its error names that port if
// another process has it.
func TestListedPorts(t *testing.T) {
	t.Parallel()
	first := freeport.Take(t, 3)
	var addresses []string
	for i := range 3 {
		addresses = append(addresses, fmt.Sprintf("127.0.0.1:%d", first+i))
	}
	begin := func(job string) (all []*process) {
		for w := range 3 {
			all = append(all, start(t, child{
				Worker: w, Workers: 3, Replicas: 1, Store: "tcp://" + addresses[0], Job: job, Steps: 3, At: 1, Do: "wait",
				TCP:    true,
				Secret: strings.Repeat("secret", 6), Addresses: addresses, Rendezvous: testWait,
			}))
		}
		return all
	}
	all := begin("listed")
	for w, p := range all {
		p.says(t, "waits")
		if at := listens(t, p.cmd.Process.Pid); !slices.Equal(at, addresses[w:w+1]) {
			t.Errorf("worker %d listens at %v, want %v", w, at, addresses[w])
		}
	}
	for _, p := range all {
		if err := p.goOn.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, p := range all {
		p.says(t, "done")
		p.ends(t)
	}
	taken, err := net.Listen("tcp", addresses[2])
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	all = begin("taken")
	want := fmt.Sprintf("worker 2 listens on port %d, which the cluster's specification (TF_CONFIG) lists for it, but "+
		"another process has it", first+2)
	if text := all[2].says(t, "error"); !strings.Contains(text, want) {
		t.Errorf("got %s, want %s", text, want)
	}
	for _, p := range all[:2] {
		p.says(t, "error")
	}
}

// listens returns the addresses on which a process listens, from /proc.
func listens(t *testing.T, pid int) []string {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, table := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // no such protocol here
		}
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" ||
				!slices.ContainsFunc(links, func(l string) bool { to, _ := os.Readlink(l); return to == "socket:["+f[9]+"]" }) {
				continue
			}
			var ip uint32
			var port int
			if _, err := fmt.Sscanf(f[1], "%X:%X", &ip, &port); err != nil || table == "tcp6" {
				out = append(out, f[1])
				continue
			}
			out = append(out, fmt.Sprintf("%d.%d.%d.%d:%d", byte(ip), byte(ip>>8), byte(ip>>16), byte(ip>>24), port))
		}
	}
	return out
}
