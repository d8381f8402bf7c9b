package launch

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// separate puts a process in a group of its own, so that a terminal's Ctrl-C reaches the agent alone and the agent reaches all that the process
// starts; and, if it is to die with the agent, has the kernel kill it then.
func separate(cmd *exec.Cmd, dies bool) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if dies {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
}

// awaitEnd waits until a child has ended, and leaves it to be waited for: until then nobody else can have its number, nor its group's. False:
// there is no such wait here.
func awaitEnd(pid int) bool {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR { //nolint:revive // again
	}
	return true
}

// onCPUs calls f with the calling thread, and so what it starts, bound to some CPUs.
func onCPUs(cpus []int, f func()) {
	var before, set unix.CPUSet
	if len(cpus) == 0 || unix.SchedGetaffinity(0, &before) != nil {
		f()
		return
	}
	for _, c := range cpus {
		set.Set(c)
	}
	if unix.SchedSetaffinity(0, &set) == nil {
		defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	}
	f()
}

// allowedCPUs are the CPUs that this process may use, in their order.
func allowedCPUs() []int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	var out []int
	for c := range len(set) * 64 {
		if set.IsSet(c) {
			out = append(out, c)
		}
	}
	return out
}
