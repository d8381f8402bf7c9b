package affinity

import (
	"fmt"
	"io"
	"os"
	"os/exec"
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
	} {
		if got := Text(read(c.root, c.allowed).Of(c.policy, c.n, c.i)); got != c.want {
			t.Errorf("%s: process %d of %d has CPUs %q, want %q", c.name, c.i, c.n, got, c.want)
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

// TestRun starts a process on each CPU in turn.
func TestRun(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux binds processes")
	}
	before := Allowed()
	for _, cpu := range before {
		var out strings.Builder
		cmd := exec.Command(os.Args[0], "-test.run=^TestPrintCPUs$", "-test.v")
		cmd.Env = append(os.Environ(), "AFFINITY_PRINT=1")
		cmd.Stdout = &out
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		Run([]int{cpu}, func() { err = cmd.Start() })
		in.Close() // it prints now: the thread that has started it has all CPUs again
		if err == nil {
			err = cmd.Wait()
		}
		if want := fmt.Sprintf("on [%d] of %d", cpu, len(before)); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("bound to CPU %d, the process prints %q (%v), want %q", cpu, out.String(), err, want)
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
	io.Copy(io.Discard, os.Stdin)
	fmt.Printf("on %v of %d\n", Allowed(), Together())
}

func FuzzParseList(f *testing.F) {
	f.Add("0,2-4")
	f.Fuzz(func(t *testing.T, s string) {
		if got, err := ParseList(s); err == nil && len(got) > 2*ListMax {
			t.Errorf("%q: %d numbers", s, len(got))
		}
	})
}
