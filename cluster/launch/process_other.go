//go:build !unix

package launch

import (
	"os"
	"os/exec"
	"syscall"
)

// Without signals a process can only be killed.
var (
	sigInterrupt           = os.Interrupt
	sigTerminate os.Signal = syscall.SIGTERM
)

func separate(*exec.Cmd, bool) {}

func awaitEnd(int) bool { return false }

func signalGroup(pid int, _ os.Signal) { killGroup(pid) }

func killGroup(pid int) {
	if p, err := os.FindProcess(pid); err == nil {
		_ = p.Kill()
		_ = p.Release()
	}
}

func groupLives(int) bool { return false }

func endingOf(state *os.ProcessState) ending { return ending{code: state.ExitCode()} }

func signalName(sig os.Signal) string { return sig.String() }

const codeStopped = 1
