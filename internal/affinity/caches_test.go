package affinity

import (
	"fmt"
	"testing"
	"testing/fstest"
)

func TestReadCache(t *testing.T) {
	caches := func(cpus int, each int, l3 string) fstest.MapFS {
		root := fstest.MapFS{"sys/devices/system/cpu/online": {Data: fmt.Appendf(nil, "0-%d\n", cpus-1)}}
		for cpu := range cpus {
			for index, c := range [...][4]string{
				{"1", "Data", "48K", fmt.Sprint(cpu)},
				{"1", "Instruction", "32K", fmt.Sprint(cpu)},
				{"2", "Unified", "1024K", fmt.Sprint(cpu)},
				{"3", "Unified", l3, fmt.Sprintf("%d-%d", cpu/each*each, cpu/each*each+each-1)},
			} {
				for i, name := range [...]string{"level", "type", "size", "shared_cpu_list"} {
					root[fmt.Sprintf("sys/devices/system/cpu/cpu%d/cache/index%d/%s", cpu, index, name)] = &fstest.MapFile{
						Data: []byte(c[i] + "\n"),
					}
				}
			}
		}
		return root
	}
	for _, c := range []struct {
		name string
		root fstest.MapFS
		cpu  int
		want Cache
	}{
		{"one cache", caches(2, 2, "32768K"), 1, Cache{32 << 20, 1}},
		{"a cache for every two CPUs", caches(8, 2, "16M"), 5, Cache{16 << 20, 4}},
		{"no third level", caches(2, 2, ""), 0, Cache{1 << 20, 2}},
		{"nothing is known", fstest.MapFS{}, 0, unknownCache},
	} {
		if got := readCache(c.root, c.cpu); got != c.want {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
	}
	if got := LastLevel(); got.Bytes <= 0 || got.Count <= 0 {
		t.Errorf("this machine: %+v", got)
	}
}
