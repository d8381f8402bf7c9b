package cgroup

import (
	"fmt"
	"testing"
	"testing/fstest"
)

func TestFolders(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"version 2", "0::/a/b\n", "[{sys/fs/cgroup/a/b true} {sys/fs/cgroup/a true} {sys/fs/cgroup true} " +
			"{sys/fs/cgroup/unified/a/b true} {sys/fs/cgroup/unified/a true} {sys/fs/cgroup/unified true}]"},
		{"version 1", "5:cpu,cpuacct:/a\n4:memory:/b\n", "[{sys/fs/cgroup/cpu/a false} {sys/fs/cgroup/cpu false}]"},
		{"a path that leaves the mount", "5:cpu:/../..\n", "[{sys/fs/cgroup/cpu false}]"},
		{"no control group", "", "[]"},
		{"garbage", "cpu\n:\n", "[]"},
	} {
		root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(c.text)}}
		if got := fmt.Sprint(Folders(root, "cpu")); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
	if got := Folders(fstest.MapFS{}, "cpu"); got != nil {
		t.Errorf("without the file: got %v, want none", got)
	}
}
