package memlimit

import (
	"runtime"
	"testing"
	"testing/fstest"
)

const meminfo = "MemTotal:       16000 kB\nMemFree:         2000 kB\n" +
	"MemAvailable:    8000 kB\nSwapFree:           0 kB\n"

const big = "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\nSwapFree: 8000000 kB\n"

func TestAvailable(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  int64
		ok    bool
	}{
		{"another system", nil, 0, false},
		{"the host alone", map[string]string{"proc/meminfo": meminfo}, 8000 << 10, true},
		{"swap", map[string]string{"proc/meminfo": meminfo + "SwapFree: 500 kB\n"}, 8500 << 10, true},
		{"version 2, a limit above the own group", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/pod/box\n",
			"sys/fs/cgroup/pod/box/memory.max": "max\n", "sys/fs/cgroup/pod/box/memory.current": "5\n",
			"sys/fs/cgroup/pod/memory.max": "1000000\n", "sys/fs/cgroup/pod/memory.current": "900000\n",
			"sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 20000\nactive_file 3000\nshmem 9\n",
		}, 123000, true},
		{"version 2, the path is the host's", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/docker/1\n",
			"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "400\n",
		}, 600, true},
		{"version 1", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a\n0::/\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5000\n", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "4000\n",
			"sys/fs/cgroup/memory/a/memory.stat":         "inactive_file 1\ntotal_inactive_file 70\ntotal_active_file 5\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
			"sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
		}, 1075, true},
		{"version 2, no swap allowed", map[string]string{
			"proc/meminfo": big, "proc/self/cgroup": "0::/pod\n",
			"sys/fs/cgroup/pod/memory.max": "1073741824\n", "sys/fs/cgroup/pod/memory.current": "536870912\n",
			"sys/fs/cgroup/pod/memory.swap.max": "0\n", "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\nactive_file 0\n",
		}, 512 << 20, true},
		{"version 2, some swap allowed", map[string]string{
			"proc/meminfo": big, "proc/self/cgroup": "0::/pod\n",
			"sys/fs/cgroup/pod/memory.max": "1073741824\n", "sys/fs/cgroup/pod/memory.current": "536870912\n",
			"sys/fs/cgroup/pod/memory.swap.max": "5000\n", "sys/fs/cgroup/pod/memory.swap.current": "2000\n",
		}, 512<<20 + 3000, true},
		{"version 2, more swap allowed than there is", map[string]string{
			"proc/meminfo": meminfo + "SwapFree: 2 kB\n", "proc/self/cgroup": "0::/pod\n",
			"sys/fs/cgroup/pod/memory.max": "1000\n", "sys/fs/cgroup/pod/memory.current": "400\n",
			"sys/fs/cgroup/pod/memory.swap.max": "5000\n", "sys/fs/cgroup/pod/memory.swap.current": "0\n",
		}, 600 + 2048, true},
		{"version 2, no swap allowed in the group above", map[string]string{
			"proc/meminfo": big, "proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/memory.swap.max": "0\n",
			"sys/fs/cgroup/pod/box/memory.max": "1000\n", "sys/fs/cgroup/pod/box/memory.current": "400\n",
			"sys/fs/cgroup/pod/box/memory.swap.max": "max\n",
		}, 600, true},
		{"version 1, a limit of memory and swap", map[string]string{
			"proc/meminfo": big, "proc/self/cgroup": "4:memory:/a\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5000\n", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "4000\n",
			"sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes": "9000\n",
			"sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes": "6000\n",
		}, 3000, true},
		{"over the limit", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "1400\n",
		}, 0, true},
		{"garbage", map[string]string{
			"proc/meminfo": meminfo + "\nx\ny z\nHuge: 99999999999999999999 kB\n", "proc/self/cgroup": "\n:\n0::../../..\n",
			"sys/fs/cgroup/memory.max": "1.5\n", "sys/fs/cgroup/memory.current": "-1\n",
		}, 8000 << 10, true},
	} {
		root := fstest.MapFS{}
		for name, text := range c.files {
			root[name] = &fstest.MapFile{Data: []byte(text)}
		}
		if got, ok := available(root); got != c.want || ok != c.ok {
			t.Errorf("%s: got %d, %v, want %d, %v", c.name, got, ok, c.want, c.ok)
		}
	}
}

func TestHere(t *testing.T) {
	left, ok := Available()
	total, okTotal := Total()
	if ok != (runtime.GOOS == "linux") || okTotal != ok {
		t.Fatalf("on %s: %v, %v", runtime.GOOS, ok, okTotal)
	}
	if ok && (left < 1<<20 || total < 64<<20) {
		t.Errorf("%d bytes are left of %d", left, total)
	}
}
