//go:build unix

package pmi

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// duplicate returns a file for a duplicate of an inherited socket. Other descriptors are an error, and stay as they
// are: if the launcher's is not passed on, its number may be that of a file that this process has opened, which is
// closed in child processes.
func duplicate(fd int) (*os.File, error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	if flags&unix.FD_CLOEXEC != 0 {
		return nil, errors.New("this process has opened it itself")
	}
	if _, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_TYPE); err != nil {
		return nil, os.NewSyscallError("getsockopt", err)
	}
	again, err := syscall.Dup(fd)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	syscall.CloseOnExec(again)
	return os.NewFile(uintptr(again), EnvFD), nil
}

// blocking makes reads of a file descriptor wait again, as MPI libraries expect. Package net makes the socket
// non-blocking for all its descriptors.
func blocking(fd int) error { return os.NewSyscallError("fcntl", syscall.SetNonblock(fd, false)) }
