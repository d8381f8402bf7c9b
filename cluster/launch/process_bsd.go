//go:build unix && !linux

package launch

import (
	"os/exec"
	"syscall"
)

// separate puts a process in a new process group, so that a terminal's Ctrl-C reaches the agent alone and the
// agent reaches all processes that it starts.
func separate(cmd *exec.Cmd, _ bool) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func awaitEnd(int) bool { return false }
