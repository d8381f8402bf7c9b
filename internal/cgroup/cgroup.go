// Package cgroup finds the control groups of this process in the file system (versions 1 and 2). The packages that
// know a controller read its files there.
package cgroup

import (
	"io/fs"
	"path"
	"strings"
)

// Folder is the folder of a control group.
type Folder struct {
	Path    string // in the file system of the machine, without the leading slash
	Unified bool   // version 2
}

// Folders returns the folders of the control groups that bound this process by a controller ("memory", "cpu"): its own
// and all above it. root is the file system of the machine. In a container the path of the group may be the host's,
// which is not mounted: then only the root of the mount exists. It returns nil if the system has no control groups.
func Folders(root fs.FS, controller string) (out []Folder) {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) { // 4:memory:/path, and 0::/path of version 2
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		switch {
		case parts[0] == "0" && parts[1] == "":
			out = upward(out, "sys/fs/cgroup", parts[2], true)
			out = upward(out, "sys/fs/cgroup/unified", parts[2], true)
		case strings.Contains(","+parts[1]+",", ","+controller+","):
			out = upward(out, "sys/fs/cgroup/"+controller, parts[2], false)
		}
	}
	return out
}

// upward appends the folder at that path below mount, and all above it up to mount.
func upward(out []Folder, mount, at string, unified bool) []Folder {
	for at = path.Clean("/" + at); at != "/"; at = path.Dir(at) {
		out = append(out, Folder{mount + at, unified})
	}
	return append(out, Folder{mount, unified})
}
