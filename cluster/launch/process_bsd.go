//go:build unix && !linux

package launch

import (
	"os/exec"
	"syscall"
)

// separate puts a process in a group of its own, so that a terminal's Ctrl-C reaches the agent alone and the agent reaches all
// that the process starts.
func separate(cmd *exec.Cmd, _ bool) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func awaitEnd(int) bool { return false }

func onCPUs(_ []int, f func()) { f() }

func allowedCPUs() []int { return nil }
