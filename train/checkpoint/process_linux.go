package checkpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// firstPIDs is the initial PID namespace, of processes outside containers. The kernel gives it this number on
// every machine.
const firstPIDs = "pid:[4026531836]"

// identify sets the fields of h that, with its PID, uniquely identify a process. It reports whether they are
// readable.
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

// startedIn parses the start time from /proc/<pid>/stat. The second field is in parentheses and may contain
// any character.
func startedIn(stat string) (ticks uint64, ok bool) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const at = 22 - 3 // of those from the third on
	if len(fields) <= at {
		return 0, false
	}
	ticks, err := strconv.ParseUint(fields[at], 10, 64)
	return ticks, err == nil
}
