package shm

import (
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// TestWatchStart watches a process that lives and one that has ended before it opened its rank, while the process that
// listened has a connection with both: it is stopped.
func TestWatchStart(t *testing.T) {
	control, err := newFile("control", int64(layoutOf(3).bytes))
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	alive := &world{cfg: Config{Ranks: []int{0}}, control: control}
	if err := alive.lock(); err != nil {
		t.Fatal(err)
	}
	defer alive.life.Close()
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			cfg: Config{Size: 3, Ranks: []int{1}}, me: 1, processes: make([]process, 3), processOf: []int{0, 1, 2},
			control: control, over: make(chan struct{}), leaderless: make(chan struct{}),
		}
		for i := range w.processes {
			w.processes[i].ranks, w.processes[i].bell = []int{i}, noBell
		}
		if err := w.lock(); err != nil {
			t.Fatal(err)
		}
		defer w.life.Close()
		if err := w.lock(); err != nil {
			t.Errorf("locking again: %v", err)
		}
		var err error
		if w.root, err = newGroup(w, 0, []int{0, 1, 2}); err != nil {
			t.Fatal(err)
		}
		defer w.root.unmap()
		w.groups = []*group{w.root}
		w.root.block(1).state.Store(stateOpen)
		end := w.root.join(1)
		w.readers.Go(w.watch)
		time.Sleep(2 * watchSlowly)
		if synctest.Wait(); len(end.Down()) != 1 {
			t.Fatalf("%d ranks are lost, want the one without a lock", len(end.Down()))
		}
		if down := <-end.Down(); down.Rank != 2 {
			t.Errorf("%v, want rank 2", down.Error())
		}
		close(w.leaderless)
		time.Sleep(2 * watchSlowly)
		if synctest.Wait(); len(end.Down()) > 0 {
			t.Errorf("%v after the process that listened has left", <-end.Down())
		}
		alive.life.Close()
		time.Sleep(2 * watchEvery)
		if synctest.Wait(); len(end.Down()) != 1 {
			t.Errorf("%d ranks are lost, want the one whose process has ended", len(end.Down()))
		}
		close(w.over)
		w.readers.Wait()
	})
}

// TestReceiveNoBell joins a group whose listening process ends before it has sent all files: this process closes the
// files that it has received, and no other.
func TestReceiveNoBell(t *testing.T) {
	const n = filesMax/2 + 2 // the files of the last but one are in the second message
	cfg := Config{Name: t.Name(), Size: n, Ranks: []int{n - 1}}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns[i] = c.(*net.UnixConn)
	}
	mem, err := newFile("arena", page)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(bell)

	reply, files := joinReply{You: n - 1}, []int(nil)
	for i := range n {
		reply.Processes = append(reply.Processes, member{i, []int{i}})
		files = append(files, int(mem.Fd()), bell)
	}
	if _, err := send(conns[0], reply); err != nil {
		t.Fatal(err)
	}
	if err := sendFiles(t.Context(), conns[0], files[:filesMax]); err != nil {
		t.Fatal(err)
	}
	conns[0].Close()
	w := &world{cfg: cfg, over: make(chan struct{}), leaderless: make(chan struct{})}
	if w.arena, err = newArena(page); err != nil {
		t.Fatal(err)
	}
	if err := w.receiveGroup(conns[1], 1); err == nil {
		t.Error("a group without all its files was received")
	}
	for i := range w.processes {
		if fd := w.processes[i].bell; fd >= 0 && checkBell(fd) != nil {
			t.Errorf("the bell of process %d is descriptor %d: %v", i, fd, checkBell(fd))
			w.processes[i].bell = noBell // closing it would harm this test
		}
	}
	w.abandon()
}
