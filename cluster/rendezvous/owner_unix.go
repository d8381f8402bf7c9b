//go:build unix

package rendezvous

import (
	"fmt"
	"os"
	"syscall"
)

// checkOwner rejects a folder of another user that everyone may write to: any user could have written its
// content.
func checkOwner(folder string) error {
	info, err := os.Stat(folder)
	if err != nil {
		return err
	}
	owner := info.Sys().(*syscall.Stat_t).Uid
	if info.Mode().Perm()&0o002 != 0 && owner != 0 && int(owner) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, and everyone may write to it", folder, owner)
	}
	return nil
}
