package shm_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

func init() {
	parts["full"] = func(c *child) error { return onSmallFileSystem(c.cfg.Name, fullBytes, fillArena) }
	parts["full, between ranks"] = func(c *child) error { return onSmallFileSystem(c.cfg.Name, smallBytes, useGroup) }
	parts["limited"] = allocateBeyondLimit
}

// TestNoMemoryIsAnError fills a file system in memory with buffers of many lengths. A buffer that does not
// fit is an error when it is requested, whatever its length, and every allocated buffer can be written.
func TestNoMemoryIsAnError(t *testing.T) { runOnSmallFileSystem(t, "full") }

// TestNoMemoryBetweenRanksIsAnError uses staging buffers and frames that the file system has no memory for.
func TestNoMemoryBetweenRanksIsAnError(t *testing.T) { runOnSmallFileSystem(t, "full, between ranks") }

// runOnSmallFileSystem runs a part in a mount namespace.
func runOnSmallFileSystem(t *testing.T, part string) {
	c, err := startIn(t, part, 0, shm.Config{Name: t.TempDir()}, &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	})
	if err != nil {
		t.Skip("this system does not let the test create a namespace:", err)
	}
	switch got := c.line(); {
	case strings.HasPrefix(got, "skip: "):
		t.Skip(got)
	case got != "done":
		t.Errorf("the process that ran out of memory printed %q, want done", got)
	}
}

const (
	fullBytes  = 8 << 20  // of the file system
	arenaBytes = 64 << 20 // of the arena in it, which is sparse
	smallBytes = 1 << 20  // of a file system that holds a group of two, but not their staging buffers nor all pipes
)

// onSmallFileSystem mounts a file system in memory and calls f with a new file of it.
func onSmallFileSystem(dir string, bytes int, f func(*os.File) error) error {
	err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	if err == nil {
		err = unix.Mount("shm", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes))
	}
	if err != nil {
		fmt.Println("skip: mounting:", err)
		return nil
	}
	file, err := os.Create(filepath.Join(dir, "shared"))
	if err == nil {
		err = f(file)
	}
	if err == nil {
		fmt.Println("done")
	}
	return err
}

func fillArena(f *os.File) error {
	if err := f.Truncate(arenaBytes); err != nil {
		return err
	}
	allocate, err := shm.ArenaOn(f, arenaBytes)
	if err != nil {
		return err
	}
	for _, first := range []int{1, 4096, 100_000, 1 << 20, 2 << 20, 3<<20 + 5} { // more, and then less, down to one page
		var given []tensor.Memory
		for bytes, refused := first, 0; refused < 2; {
			m, err := allocate(bytes)
			if err == nil {
				b := m.HostBytes()
				for i := 0; i < len(b); i += 1024 {
					if b[i] != 0 {
						return fmt.Errorf("byte %d of %d is %d", i, len(b), b[i])
					}
					b[i] = 1
				}
				b[len(b)-1] = 1
				given = append(given, m)
				continue
			}
			if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.ENOMEM) {
				return fmt.Errorf("%d bytes more than the file system has: %w", bytes, err)
			}
			bytes, refused = 1, refused+1
		}
		if n := len(given); n == 0 || first == 4096 && n != fullBytes/4096 && n != fullBytes/4096-1 {
			return fmt.Errorf("%d buffers of %d bytes fit into %d", n, first, fullBytes)
		}
		if _, err := allocate(arenaBytes / 2); err == nil {
			return errors.New("half of the arena was allocated, which is more than the file system has")
		}
		for _, m := range given {
			m.Owner.Release()
		}
	}
	return nil
}

func useGroup(f *os.File) error {
	ends, err := shm.EndsOn(f)
	if err != nil {
		return err
	}
	ctx, cancel := soon()
	defer cancel()
	frame := make([]byte, 1000)
	pair := func() (errs [2]error) {
		var both sync.WaitGroup
		for i, e := range ends {
			both.Go(func() { errs[i] = e.Exchange(ctx, 1-i, transport.Frame{Data: frame}, 1-i, make([]byte, len(frame))) })
		}
		both.Wait()
		return errs
	}
	if errs := pair(); errs != [2]error{} {
		return fmt.Errorf("frames that there is memory for: %v", errs)
	}
	for _, e := range ends {
		if n := e.Capabilities().StagingBytes; n < 2*smallBytes {
			return fmt.Errorf("a staging buffer of %d bytes is too short for this test", n)
		}
		staging := e.Memory().StagingBuffer(e.Rank())
		for i := range staging {
			staging[i] = 1
		}
		e.Memory().Publish(&transport.Slot{})
		if err := e.Memory().Signal(0); !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("Signal after a staging buffer without memory: %v, want %w", err, unix.ENOSPC)
		}
		if err := e.Memory().Await(ctx, -1, 0); !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("Await after a staging buffer without memory: %v, want %w", err, unix.ENOSPC)
		}
	}
	if _, err := f.WriteAt(make([]byte, 1<<20), 2<<20); !errors.Is(err, unix.ENOSPC) { // takes what is left
		return fmt.Errorf("filling the file system: %v, want %w", err, unix.ENOSPC)
	}
	fresh := ends[0] // sends to itself, by a pipe that was not used yet
	if err := fresh.Exchange(ctx, 0, transport.Frame{Data: frame}, -1, nil); !errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("a frame without memory: %v, want %w", err, unix.ENOSPC)
	}
	return nil
}

// TestBusySystem checks that a call that reports a busy system is repeated for a while, and that then another call
// requests the memory.
func TestBusySystem(t *testing.T) {
	for _, c := range []struct {
		busy      int // how many calls fail
		allocated bool
	}{{3, false}, {10_000, true}} {
		fd, err := unix.MemfdCreate("busy", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "busy")
		defer f.Close()
		if err := f.Truncate(smallBytes); err != nil {
			t.Fatal(err)
		}
		b, err := unix.Mmap(fd, 0, smallBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(b)
		calls := 0
		if err := shm.BackBy(f, b, func([]byte, int) error {
			if calls++; calls > c.busy {
				return nil
			}
			return unix.EAGAIN
		}); err != nil {
			t.Errorf("busy for %d calls: %v", c.busy, err)
		}
		var stat unix.Stat_t
		if err := unix.Fstat(fd, &stat); err != nil {
			t.Fatal(err)
		}
		if allocated := stat.Blocks*512 >= smallBytes; allocated != c.allocated {
			t.Errorf("busy for %d calls: after %d calls it is allocated in another way: %v, want %v",
				c.busy, calls, allocated, c.allocated)
		}
	}
}

// TestMemoryLimitIsAnError requests more than the limit of a memory control group. The kernel would kill a process that
// used it.
func TestMemoryLimitIsAnError(t *testing.T) {
	group, limitFile := memoryGroup(t)
	if err := os.WriteFile(filepath.Join(group, limitFile), []byte(strconv.Itoa(limitBytes)), 0o644); err != nil {
		t.Skip("the memory control group takes no limit:", err)
	}
	c := start(t, "limited", 0, shm.Config{
		Name: fmt.Sprintf("limited-%d", os.Getpid()), Job: "limit", Size: 1,
		Ranks: []int{0},
	})
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(c.cmd.Process.Pid)),
		0o644); err != nil {
		t.Skip("the memory control group takes no process:", err)
	}
	c.in()
	if got := c.line(); got != "done" {
		t.Errorf("the process with a limit printed %q, want done", got)
	}
}

const limitBytes = 128 << 20

func allocateBeyondLimit(c *child) error {
	c.wait() // until this process is in the group
	ctx, cancel := soon()
	defer cancel()
	ends, err := shm.Open(ctx, c.cfg)
	if err != nil {
		return err
	}
	defer ends[0].Close()
	allocate := ends[0].(interface {
		NewBuffer(bytes int) (tensor.Memory, error)
	}).NewBuffer
	_, noMemory := allocate(4 * limitBytes)
	if !errors.Is(noMemory, unix.ENOMEM) || !strings.Contains(noMemory.Error(), "memory control group") {
		return fmt.Errorf("%d bytes under a limit of %d: %v", 4*limitBytes, limitBytes, noMemory)
	}
	m, err := allocate(limitBytes / 8)
	if err != nil {
		return err
	}
	m.Owner.Release()
	fmt.Println("done")
	return nil
}

// memoryGroup creates a memory control group for the test, and returns its folder and the file of its limit.
func memoryGroup(t *testing.T) (dir, limitFile string) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skip(err)
	}
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for _, g := range [][2]string{{"sys/fs/cgroup/memory", "memory.limit_in_bytes"}, {"sys/fs/cgroup", "memory.max"}} {
			dir := filepath.Join("/", g[0], parts[2], fmt.Sprintf("lockstep-test-%d", os.Getpid()))
			if os.Mkdir(dir, 0o755) != nil {
				continue
			}
			t.Cleanup(func() {
				for range 100 { // a process that has ended is still in the group for a moment
					if os.Remove(dir) == nil {
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
				t.Errorf("the group %s was not removed", dir)
			})
			if _, err := os.Stat(filepath.Join(dir, g[1])); err == nil {
				return dir, g[1]
			}
		}
	}
	t.Skip("this system lets the test make no memory control group")
	return "", ""
}
