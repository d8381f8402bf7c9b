//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// tryLock locks an open file exclusively, until it is closed. It reports false if another process has locked
// it. On file systems without locks, the error is errors.ErrUnsupported.
func tryLock(f *os.File) (bool, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		for failed = syscall.EINTR; failed == syscall.EINTR; {
			failed = syscall.Flock(int(fd), syscall.LOCK_EX|syscall.LOCK_NB)
		}
	}); err != nil {
		return false, err
	}
	switch {
	case failed == nil:
		return true, nil
	case errors.Is(failed, syscall.EWOULDBLOCK):
		return false, nil
	case errors.Is(failed, syscall.ENOLCK), errors.Is(failed, syscall.EINVAL), errors.Is(failed, errors.ErrUnsupported):
		return false, errors.ErrUnsupported
	}
	return false, fmt.Errorf("locking %s: %w", f.Name(), failed)
}
