//go:build unix

package private

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// check returns an error unless a folder belongs to this user and no other user can modify its content or
// replace it. It must belong to this user, must not be a symbolic link, and no other user may write to it or
// to the folders above, unless these are sticky like /tmp. The folders above must belong to this user or to root.
func check(folder string) error {
	info, err := os.Lstat(folder)
	if err != nil {
		return fmt.Errorf("the folder %s: %w", folder, err)
	}
	owner := ownerOf(info)
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%s is a symbolic link, which user %d has made; want a folder of this user's own", folder,
			owner)
	case !info.IsDir():
		return fmt.Errorf("%s is not a folder; want a folder that belongs to this user", folder)
	case owner != os.Geteuid():
		return fmt.Errorf("the folder %s belongs to user %d; want one of this user's own (%d)", folder, owner,
			os.Geteuid())
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("other users may write to the folder %s (its mode is %#o); want mode 0700", folder,
			info.Mode().Perm())
	}
	return checkPlace(folder)
}

// checkPlace checks the folders above: a user who may rename the folder can replace it.
func checkPlace(folder string) error {
	above, err := filepath.EvalSymlinks(filepath.Dir(folder))
	if err != nil {
		return fmt.Errorf("the folder %s: %w", folder, err)
	}
	for {
		info, err := os.Stat(above)
		if err != nil {
			return fmt.Errorf("the folder %s: %w", folder, err)
		}
		mode, owner := info.Mode(), ownerOf(info)
		open := mode.Perm()&0o022 != 0
		// The owner may rename the content of a folder, even of a sticky one. A user namespace hides the owner of
		// folders from outside, such as /.
		if owner != 0 && owner != os.Geteuid() && (open || !unmapped(owner)) {
			return fmt.Errorf("user %d may rename the folder %s, since %s belongs to that user (its mode is %v); "+
				"want one of this user (%d) or of root", owner, folder, above, mode, os.Geteuid())
		}
		if open && mode&fs.ModeSticky == 0 {
			return fmt.Errorf("other users may rename the folder %s, since they may write to %s (its mode is %v); want a "+
				"sticky one", folder, above, mode)
		}
		parent := filepath.Dir(above)
		if parent == above {
			return nil
		}
		above = parent
	}
}

// unmapped reports whether a user id is the one of all users that are not mapped in this process's user namespace.
func unmapped(owner int) bool {
	text, err := os.ReadFile("/proc/sys/kernel/overflowuid")
	if err != nil || strings.TrimSpace(string(text)) != strconv.Itoa(owner) {
		return false
	}
	text, err = os.ReadFile("/proc/self/uid_map")
	// The first namespace has all: there the id is a user like any other.
	return err == nil && strings.Join(strings.Fields(string(text)), " ") != "0 0 4294967295"
}

// idOf identifies a folder on this host, whatever its path in this process's mounts is.
func idOf(_ string, info fs.FileInfo) string {
	stat := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d-%d", stat.Dev, stat.Ino)
}

func ownerOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }
