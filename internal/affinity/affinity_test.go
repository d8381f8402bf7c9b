package affinity

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// machine returns the files of a machine: the CPUs of its nodes, and of its cores.
func machine(nodes []string, cores ...[]int) fstest.MapFS {
	root := fstest.MapFS{}
	for i, list := range nodes {
		root[fmt.Sprintf("sys/devices/system/node/node%d/cpulist", i)] = &fstest.MapFile{Data: []byte(list + "\n")}
	}
	for _, core := range cores {
		for _, cpu := range core {
			root[fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu)] = &fstest.MapFile{
				Data: []byte(Text(core) + "\n"),
			}
		}
	}
	return root
}

func upTo(n int) (out []int) {
	for i := range n {
		out = append(out, i)
	}
	return out
}

func TestOf(t *testing.T) {
	plain := machine(nil)
	nodes := machine([]string{"0,2,4,6", "1,3,5,7"})
	threads := machine([]string{"0-7"}, []int{0, 4}, []int{1, 5}, []int{2, 6}, []int{3, 7})
	hybrid := machine([]string{"0-11"}, []int{0, 1}, []int{2, 3}, []int{4, 5}, []int{6, 7})
	hybrid["sys/devices/cpu_core/cpus"] = &fstest.MapFile{Data: []byte("0-7\n")}
	hybrid["sys/devices/cpu_atom/cpus"] = &fstest.MapFile{Data: []byte("8-11\n")}
	capacities := machine(nil)
	for cpu := range 6 {
		capacities[fmt.Sprintf("sys/devices/system/cpu/cpu%d/cpu_capacity", cpu)] = &fstest.MapFile{
			Data: fmt.Appendln(nil, 446+578*(cpu/4)), // four slow ones, two fast ones
		}
	}
	for _, c := range []struct {
		name    string
		root    fstest.MapFS
		allowed []int
		policy  Policy
		n, i    int
		want    string
	}{
		{"a share", plain, upTo(8), Share, 4, 1, "2-3"},
		{"the rest of a division stays free", plain, upTo(8), Share, 3, 2, "4-5"},
		{"more processes than CPUs", plain, upTo(8), Share, 9, 1, ""},
		{"a core each", plain, upTo(8), Core, 4, 1, "2"},
		{"nothing is bound", plain, upTo(8), None, 2, 1, ""},
		{"no CPUs are known", plain, nil, Share, 1, 0, ""},
		{"one process", plain, []int{4, 6}, Share, 1, 0, "4,6"},
		{"nodes: the first", nodes, upTo(8), Share, 2, 0, "0,2,4,6"},
		{"nodes: the second", nodes, upTo(8), Share, 2, 1, "1,3,5,7"},
		{"nodes: a third", nodes, upTo(8), Share, 3, 2, "1,3"},
		{"nodes: part of the CPUs", nodes, []int{4, 5, 6}, Share, 3, 2, "5"},
		{"numa: 4 processes", nodes, upTo(8), NUMA, 4, 1, "0,2,4,6"},
		{"numa: 9 processes", nodes, upTo(8), NUMA, 9, 8, "1,3,5,7"},
		{"numa: one process has one node", nodes, upTo(8), NUMA, 1, 0, "0,2,4,6"},
		{"numa without nodes", plain, upTo(4), NUMA, 2, 1, "0-3"},
		{"threads: whole cores", threads, upTo(8), Share, 2, 1, "2-3,6-7"},
		{"threads: one core", threads, upTo(8), Core, 4, 3, "3,7"},
		{"threads: fewer cores than processes", threads, upTo(8), Share, 8, 1, "4"},
		{"threads: half of them allowed", threads, []int{0, 4, 5}, Share, 2, 0, "0,4"},
		{"no such process", plain, upTo(8), Share, 2, 2, ""},
		{"threads: an odd number", threads, upTo(8), Share, 5, 1, "4"},
		{"threads: the last of an odd number has the last core", threads, upTo(8), Share, 5, 4, "3"},
		{"threads: more processes than threads", threads, upTo(8), Share, 9, 8, ""},
		{"nodes: a share is in one if it can", machine([]string{"0-4", "5-9"}), upTo(10), Share, 4, 2, "5-6"},
		{"nodes: it is in two if that is more", machine([]string{"0-5", "6-11"}), upTo(12), Share, 3, 1, "4-7"},
		{"nodes: fewer processes than nodes", machine([]string{"0-1", "2-3", "4-5"}), upTo(6), Share, 2, 1, "3-5"},
		{"nodes: cores of both", nodes, upTo(8), Core, 2, 1, "1"},
		{"hybrid: a part of each kind", hybrid, upTo(12), Share, 2, 1, "4-7,10-11"},
		{"hybrid: too few fast cores", hybrid, upTo(12), Share, 5, 0, ""},
		{"hybrid: one process has all", hybrid, upTo(12), Share, 1, 0, "0-11"},
		{"hybrid: the fastest cores", hybrid, upTo(12), Core, 4, 3, "6-7"},
		{"hybrid: too few of the fastest", hybrid, upTo(12), Core, 5, 4, "8"},
		{"hybrid: only slow cores are allowed", hybrid, []int{8, 9, 10, 11}, Share, 2, 1, "10-11"},
		{"capacities", capacities, upTo(6), Share, 2, 0, "0-1,4"},
		{"thousands", plain, upTo(4096), Share, 4, 3, "3072-4095"},
	} {
		if got := Text(read(c.root, c.allowed).Of(c.policy, c.n, c.i)); got != c.want {
			t.Errorf("%s: process %d of %d has CPUs %q, want %q", c.name, c.i, c.n, got, c.want)
		}
	}
}

// TestShares checks the shares on machines of all forms: they are equal and disjoint. Two processes share a core only
// if there are more processes than cores, and then no core is idle.
func TestShares(t *testing.T) {
	for nodes := 1; nodes <= 4; nodes++ {
		for cores := 1; cores <= 6; cores++ { // of a node
			for width := 1; width <= 4; width *= 2 {
				var c CPUs
				coreOf := map[int]int{}
				for node := range nodes {
					c.nodes = append(c.nodes, nil)
					for core := range cores {
						at := node*cores + core
						c.nodes[node] = append(c.nodes[node], nil)
						for thread := range width {
							cpu := thread*nodes*cores + at
							coreOf[cpu] = at
							c.nodes[node][core] = append(c.nodes[node][core], cpu)
						}
					}
				}
				for n := 1; n <= nodes*cores*width+1; n++ {
					for _, p := range []Policy{Share, Core} {
						t.Run(fmt.Sprintf("%d nodes of %d cores of %d threads, %d processes, %s", nodes, cores, width, n, p),
							func(t *testing.T) { checkShares(t, c, coreOf, p, n) })
					}
				}
			}
		}
	}
}

// checkShares checks the shares of n processes on a machine whose CPUs have these cores.
func checkShares(t *testing.T, c CPUs, coreOf map[int]int, p Policy, n int) {
	cores := len(c.cores())
	ofCPU, ofCore := map[int]int{}, map[int]map[int]bool{}
	each := len(c.Of(p, n, 0))
	for i := range n {
		own := c.Of(p, n, i)
		if len(own) != each || !slices.IsSorted(own) {
			t.Fatalf("process %d has CPUs %v, want %d in order, as process 0", i, own, each)
		}
		for _, cpu := range own {
			ofCPU[cpu]++
			core, ok := coreOf[cpu]
			if !ok || ofCPU[cpu] > 1 {
				t.Fatalf("process %d has CPUs %v: CPU %d does not exist, or is another's", i, own, cpu)
			}
			if ofCore[core] == nil {
				ofCore[core] = map[int]bool{}
			}
			ofCore[core][i] = true
		}
	}
	switch {
	case n > c.Count():
		if each != 0 {
			t.Errorf("%d processes on %d CPUs are bound", n, c.Count())
		}
		if own := c.Of(p, n, 0); own != nil {
			t.Errorf("%d processes on %d CPUs: CPUs %v, want nil", n, c.Count(), own)
		}
		return
	case each == 0:
		t.Fatalf("%d processes on %d CPUs are not bound", n, c.Count())
	case n >= cores && len(ofCore) != cores:
		t.Errorf("%d processes use %d of %d cores", n, len(ofCore), cores)
	case n <= cores && p == Share && cores-len(ofCore) >= n:
		t.Errorf("%d cores are free, enough for one more for each of %d processes", cores-len(ofCore), n)
	}
	for core, by := range ofCore {
		if most := (n + cores - 1) / cores; len(by) > most {
			t.Errorf("core %d has %d processes, want at most %d", core, len(by), most)
		}
	}
}

func TestNodes(t *testing.T) {
	root := machine([]string{"0-1,4", "", "2-3"})
	root["sys/devices/system/node/node10/cpulist"] = &fstest.MapFile{Data: []byte("9\n")}
	root["sys/devices/system/node/has_normal_memory/no"] = &fstest.MapFile{}
	if got, want := fmt.Sprint(nodes(root)), "[[0 1 4] [2 3] [9]]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got := read(root, upTo(16)).Count(); got != 16 {
		t.Errorf("%d CPUs, want all 16: those of no node too", got)
	}
}

// TestRun starts processes on one CPU each, and then on the same CPU.
func TestRun(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux binds processes")
	}
	before := Allowed()
	apart := before[:min(len(before), 8)] // one process on each CPU
	same := []int{before[0], before[0]}
	groups := [][]int{apart, same}
	if lists, _ := filepath.Glob("/proc/self/task/*/children"); len(lists) == 0 {
		groups = groups[:1] // together goes by the parent
	}
	for _, cpus := range groups {
		together := len(slices.Compact(slices.Clone(cpus)))
		var ins []io.WriteCloser
		var outs []*bufio.Scanner
		for _, cpu := range cpus {
			cmd := exec.Command(os.Args[0], "-test.run=^TestPrintCPUs$", "-test.v")
			cmd.Env = append(os.Environ(), "AFFINITY_PRINT=1")
			in, errIn := cmd.StdinPipe()
			out, errOut := cmd.StdoutPipe()
			if err := errors.Join(errIn, errOut); err != nil {
				t.Fatal(err)
			}
			var err error
			Run([]int{cpu}, func() { err = cmd.Start() })
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				in.Close()
				if err := cmd.Wait(); err != nil {
					t.Error(err)
				}
			})
			ins, outs = append(ins, in), append(outs, bufio.NewScanner(out))
		}
		for i, cpu := range cpus {
			fmt.Fprintln(ins[i]) // it prints now: the thread that has started it has all CPUs again
			for outs[i].Scan() && !strings.HasPrefix(outs[i].Text(), "on [") {
			}
			if got, want := outs[i].Text(), fmt.Sprintf("on [%d] of %d", cpu, together); got != want {
				t.Errorf("of processes bound to CPUs %v, one prints %q, want %q", cpus, got, want)
			}
		}
		for _, in := range ins {
			in.Close()
		}
		for _, out := range outs {
			for out.Scan() { // until it ends
			}
		}
	}
	if after := Allowed(); !slices.Equal(after, before) {
		t.Errorf("CPUs %v after Run, want %v as before", after, before)
	}
	ran := false
	if Run(nil, func() { ran = true }); !ran {
		t.Error("without CPUs the function was not called")
	}
}

// TestPrintCPUs is the process that TestRun starts.
func TestPrintCPUs(t *testing.T) {
	if os.Getenv("AFFINITY_PRINT") == "" {
		t.Skip("started by TestRun only")
	}
	io.ReadFull(os.Stdin, make([]byte, 1))
	fmt.Printf("\non %v of %d\n", Allowed(), together(ListMax))
	io.Copy(io.Discard, os.Stdin)
}

func FuzzParseList(f *testing.F) {
	f.Add("0,2-4")
	f.Fuzz(func(t *testing.T, s string) {
		if got, err := ParseList(s); err == nil && len(got) > 2*ListMax {
			t.Errorf("%q: %d numbers", s, len(got))
		}
	})
}
