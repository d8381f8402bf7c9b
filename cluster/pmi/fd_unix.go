//go:build unix

package pmi

import (
	"os"
	"syscall"
)

// duplicate returns another file for a file descriptor.
func duplicate(fd int) (*os.File, error) {
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
