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
