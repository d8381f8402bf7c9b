package shm_test

import (
	"errors"
	"math/bits"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/transport/shm"
)

func init() { parts["sandbox"] = sandboxPart }

// TestSandbox opens a group in a sandbox whose kernel has no locks of open files, as that of gVisor: processes there do
// not share memory, and Open says so.
func TestSandbox(t *testing.T) {
	if bits.UintSize < 64 {
		t.Skip("the sandbox filters the system calls of 64-bit programs")
	}
	t.Parallel()
	switch line := start(t, "sandbox", 0, config(t, 2, 0, 1)).line(); {
	case strings.HasPrefix(line, noFilter):
		t.Skip(line)
	case !strings.HasPrefix(line, `host "", shm: processes cannot share memory on this system`):
		t.Errorf("it printed %q", line)
	}
}

// noFilter is what the sandbox prints first if the system has no filters of system calls, before the error.
const noFilter = "no filter of system calls: "

// sandboxPart opens a group when the system refuses locks of open files.
func sandboxPart(c *child) error {
	const (
		syscallNumber, secondArgument = 0, 24 // in struct seccomp_data
		allow, invalid                = 0x7fff0000, 0x50000 | uint32(unix.EINVAL)
		load, equal, atLeast, result  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K,
			unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	)
	filter := []unix.SockFilter{
		{Code: load, K: syscallNumber},
		{Code: equal, K: unix.SYS_FCNTL, Jf: 4},
		{Code: load, K: secondArgument},
		{Code: atLeast, K: unix.F_OFD_GETLK, Jf: 2},
		{Code: atLeast, K: unix.F_OFD_SETLKW + 1, Jt: 1},
		{Code: result, K: invalid},
		{Code: result, K: allow},
	}
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		c.say("%s%v", noFilter, err)
		return nil
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, err := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); err != 0 {
		c.say("%s%v", noFilter, err)
		return nil
	}
	runtime.UnlockOSThread()
	ctx, cancel := soon()
	defer cancel()
	ends, err := shm.Open(ctx, c.cfg)
	for _, e := range ends {
		err = errors.Join(err, e.Close())
	}
	c.say("host %q, %v", shm.HostID(), err)
	return nil
}
