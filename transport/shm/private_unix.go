//go:build unix

package shm

import (
	"fmt"
	"os"
	"syscall"
)

// checkPrivate returns an error unless the directory belongs to this user, and no other user can enter it.
func checkPrivate(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("shm: the directory for sockets: %w", err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(stat.Uid) != os.Getuid() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("shm: the directory for sockets, %s, is %v, "+
			"want one of this user that no other can enter: remove it", dir, info.Mode())
	}
	return nil
}
