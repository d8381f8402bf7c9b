package checkpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// firstPIDs is the namespace of processes in no container: the kernel gives it this number on every machine.
const firstPIDs = "pid:[4026531836]"

// identify fills in what tells the process whose PID h has from all others, as far as this process can see it.
func (h *Holder) identify() bool {
	boot, err1 := os.ReadFile("/proc/sys/kernel/random/boot_id")
	pids, err2 := os.Readlink("/proc/self/ns/pid")
	stat, err3 := os.ReadFile(fmt.Sprintf("/proc/%d/stat", h.PID))
	if err1 != nil || err2 != nil || err3 != nil {
		return false
	}
	started, ok := startedIn(string(stat))
	if !ok {
		return false
	}
	h.Boot, h.PIDs, h.Started = strings.TrimSpace(string(boot)), pids, started
	return true
}

// startedIn reads when a process was started out of its /proc/<pid>/stat, whose second field may hold anything.
func startedIn(stat string) (ticks uint64, ok bool) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const at = 22 - 3 // of those from the third on
	if len(fields) <= at {
		return 0, false
	}
	ticks, err := strconv.ParseUint(fields[at], 10, 64)
	return ticks, err == nil
}
