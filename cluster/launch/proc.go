package launch

import (
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/cgroup"
)

// Information from Linux's /proc and /sys, read from a file system whose root is "/". Without these files
// nothing is known.

// stopped reports whether a process is stopped, by SIGSTOP for example, or by a debugger.
func stopped(root fs.FS, pid int) bool {
	state, _ := processState(root, strconv.Itoa(pid))
	return state == "T" || state == "t"
}

// suspended reports whether a process was stopped by a signal; one that a debugger holds is not.
func suspended(root fs.FS, pid int) bool {
	state, _ := processState(root, strconv.Itoa(pid))
	return state == "T"
}

// groupMembers returns the running processes of a group, and the number of those that have ended but were not reaped
// yet.
func groupMembers(root fs.FS, group int) (running []int, dead int) {
	entries, _ := fs.ReadDir(root, "proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		switch state, of := processState(root, entry.Name()); {
		case of != group:
		case state == "Z" || state == "X":
			dead++
		default:
			running = append(running, pid)
		}
	}
	return running, dead
}

// processState reads a process's state and group.
func processState(root fs.FS, pid string) (state string, group int) {
	text, err := fs.ReadFile(root, path.Join("proc", pid, "stat"))
	if err != nil {
		return "", 0
	}
	// pid (name) state parent group …, where the name may hold anything
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 3 {
		return "", 0
	}
	group, _ = strconv.Atoi(fields[2])
	return fields[0], group
}

// memoryKills is the number of processes that the kernel has killed so far because memory ran out.
type memoryKills struct {
	count int
	// where names the set of processes that is counted: this control group, or the whole machine.
	where string
}

// readMemoryKills reads the counter of this process's control group, which is exact, else the whole
// machine's.
func readMemoryKills(root fs.FS) (memoryKills, bool) {
	for _, group := range cgroup.Folders(root, "memory") {
		file := "memory.oom_control"
		if group.Unified {
			file = "memory.events"
		}
		if n, ok := counter(root, path.Join(group.Path, file), "oom_kill"); ok {
			return memoryKills{n, "this control group"}, true
		}
	}
	n, ok := counter(root, "proc/vmstat", "oom_kill")
	return memoryKills{n, "this machine"}, ok
}

// counter reads the number behind a name in a file of "name number" lines.
func counter(root fs.FS, file, name string) (int, bool) {
	text, err := fs.ReadFile(root, file)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			n, err := strconv.Atoi(strings.TrimSpace(rest))
			return n, err == nil
		}
	}
	return 0, false
}
