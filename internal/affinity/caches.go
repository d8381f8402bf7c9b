package affinity

import (
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
)

// Cache is the last level of the caches of this machine.
type Cache struct {
	Bytes int // of the one that the lowest CPU of this process uses
	Count int // how many there are
}

// unknownCache is assumed where the system does not describe its caches: that of a server of 2024.
var unknownCache = Cache{Bytes: 32 << 20, Count: 1}

// LastLevel returns the last-level caches, as the system describes them (Linux: sysfs); where it does not, one of 32
// MiB. It reads them once.
func LastLevel() Cache { return lastLevel() }

var lastLevel = sync.OnceValue(func() Cache {
	if runtime.GOOS != "linux" {
		return unknownCache
	}
	first := 0
	if own := Allowed(); len(own) > 0 {
		first = own[0]
	}
	return readCache(os.DirFS("/"), first)
})

// readCache returns the last-level caches of the machine whose file system is root; Bytes is that of a CPU.
func readCache(root fs.FS, cpu int) Cache {
	bytes, _ := cacheOf(root, cpu)
	if bytes == 0 {
		return unknownCache
	}
	count, seen := 0, map[int]bool{}
	for _, c := range listOf(root, "sys/devices/system/cpu/online") {
		if seen[c] {
			continue
		}
		if size, shared := cacheOf(root, c); size > 0 {
			count++
			cpus, _ := ParseList(shared)
			for _, other := range cpus {
				seen[other] = true
			}
		}
	}
	return Cache{Bytes: bytes, Count: max(count, 1)}
}

// cacheOf returns the size of a CPU's last-level cache, and the list of the CPUs that share it; 0: unknown.
func cacheOf(root fs.FS, cpu int) (bytes int, shared string) {
	text := func(index int, name string) string {
		return line(root, fmt.Sprintf("sys/devices/system/cpu/cpu%d/cache/index%d/%s", cpu, index, name))
	}
	top := 0
	for index := range 16 {
		level, err := strconv.Atoi(text(index, "level"))
		if err != nil {
			break
		}
		size, ok := parseSize(text(index, "size"))
		if ok && level > top && text(index, "type") != "Instruction" {
			top, bytes, shared = level, size, text(index, "shared_cpu_list")
		}
	}
	return bytes, shared
}

// parseSize parses the size of a cache: "32768K".
func parseSize(s string) (bytes int, ok bool) {
	shift := 0
	switch {
	case strings.HasSuffix(s, "K"):
		shift = 10
	case strings.HasSuffix(s, "M"):
		shift = 20
	}
	n, err := strconv.Atoi(strings.TrimRight(s, "KM"))
	return n << shift, err == nil && n > 0 && n < 1<<20
}
