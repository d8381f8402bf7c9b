package launch

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// separate puts a process in a new process group, so that a terminal's Ctrl-C reaches the agent alone and the
// agent reaches all processes that it starts. With dies, the kernel kills the process when the agent dies.
func separate(cmd *exec.Cmd, dies bool) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if dies {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
}

// awaitEnd waits until a child has ended, without reaping it: until it is reaped no other process can get its
// number, nor its group's. It returns false if the system has no such wait.
func awaitEnd(pid int) bool {
	//nolint:revive // interrupted: retry
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
	return true
}

// onCPUs calls f with the calling thread bound to some CPUs; processes that f starts inherit the binding.
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

// allowedCPUs returns the CPUs that this process may use, in order.
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
