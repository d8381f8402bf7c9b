//go:build unix

package rendezvous

import (
	"fmt"
	"os"
	"syscall"
)

// checkOwner refuses a folder that somebody else has laid out for everyone: what stands there could be anybody's.
func checkOwner(folder string) error {
	info, err := os.Stat(folder)
	if err != nil {
		return err
	}
	owner := info.Sys().(*syscall.Stat_t).Uid
	if info.Mode().Perm()&0o002 != 0 && owner != 0 && int(owner) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, and everybody may write there", folder, owner)
	}
	return nil
}
