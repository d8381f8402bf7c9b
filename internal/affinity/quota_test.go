package affinity

import (
	"fmt"
	"io/fs"
	"testing"
	"testing/fstest"
)

func TestQuota(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  int // -1: none
	}{
		{"none", map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, -1},
		{"one and a half", map[string]string{
			"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
		}, 1},
		{"two", map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2},
		{"the least of the groups", map[string]string{
			"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
			"sys/fs/cgroup/a/cpu.max": "300000 100000\n",
		}, 3},
		{"version 1", map[string]string{
			"proc/self/cgroup":                      "3:cpu,cpuacct:/x\n",
			"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us":  "50000\n",
			"sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
		}, 0},
		{"version 1 without a limit", map[string]string{
			"proc/self/cgroup": "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
			"sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
		}, -1},
		{"garbage", map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "5\n"}, -1},
		{"a period of 0", map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "5 0\n"}, -1},
		{"no control groups", nil, -1},
	} {
		root := fstest.MapFS{}
		for name, text := range c.files {
			root[name] = &fstest.MapFile{Data: []byte(text)}
		}
		got, ok := least(limits(root, func(fs.FileInfo) uint64 { return 0 }))
		if !ok {
			got = -1
		}
		if got != c.want {
			t.Errorf("%s: got %d, want %d", c.name, got, c.want)
		}
	}
}

// TestLimits checks that each limit has the group that sets it.
func TestLimits(t *testing.T) {
	folder := func(id uint64) *fstest.MapFile { return &fstest.MapFile{Mode: fs.ModeDir, Sys: id} }
	root := fstest.MapFS{
		"proc/self/cgroup":            {Data: []byte("0::/a/b/c\n")},
		"sys/fs/cgroup/a":             folder(1),
		"sys/fs/cgroup/a/cpu.max":     {Data: []byte("400000 100000\n")},
		"sys/fs/cgroup/a/b":           folder(2),
		"sys/fs/cgroup/a/b/cpu.max":   {Data: []byte("max 100000\n")},
		"sys/fs/cgroup/a/b/c":         folder(3),
		"sys/fs/cgroup/a/b/c/cpu.max": {Data: []byte("50000 100000\n")},
	}
	got := limits(root, func(info fs.FileInfo) uint64 { return info.Sys().(uint64) })
	if want := "[{3 0} {1 4}]"; fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
}
