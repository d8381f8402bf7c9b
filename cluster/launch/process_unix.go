//go:build unix

package launch

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// The signals that an agent sends.
var (
	sigInterrupt os.Signal = syscall.SIGINT
	sigTerminate os.Signal = syscall.SIGTERM
)

// signalGroup sends a signal to a process and its group. Stopped processes are continued, so that they can
// handle it.
func signalGroup(pid int, sig os.Signal) {
	if s, ok := sig.(syscall.Signal); ok {
		_ = syscall.Kill(-pid, s)
		_ = syscall.Kill(-pid, syscall.SIGCONT)
	}
}

func killGroup(pid int) { _ = syscall.Kill(-pid, syscall.SIGKILL) }

// groupLives reports whether a group has a process left that is not dead.
func groupLives(pid int) bool {
	if syscall.Kill(-pid, 0) != nil {
		return false
	}
	running, dead := groupMembers(os.DirFS("/"), pid)
	return len(running) > 0 || dead == 0 // without /proc neither is known
}

// endingOf returns how a process ended.
func endingOf(state *os.ProcessState) ending {
	status, ok := state.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() {
		return ending{code: state.ExitCode()}
	}
	return ending{code: 128 + int(status.Signal()), signal: signalName(status.Signal()), core: status.CoreDump()}
}

func signalName(sig os.Signal) string {
	if s, ok := sig.(syscall.Signal); ok {
		if name := unix.SignalName(s); name != "" {
			return name
		}
	}
	return sig.String()
}

// codeStopped is the exit code of a worker that was stopped.
const codeStopped = 128 + int(syscall.SIGSTOP)
