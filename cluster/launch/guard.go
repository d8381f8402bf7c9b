package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
)

// Guard is what the process does that [Config].Guard starts: it reads which process groups there are, and at the input's end, when
// its agent has died, kills those that are left. No signal but SIGKILL ends it before that.
func Guard(input io.Reader) {
	signal.Ignore(sigInterrupt, sigTerminate)
	groups := map[int]bool{}
	for s := bufio.NewScanner(input); s.Scan(); {
		if pid, err := strconv.Atoi(strings.TrimLeft(s.Text(), "+-")); err == nil && pid > 1 {
			groups[pid] = s.Text()[0] == '+'
		}
	}
	for pid, there := range groups {
		if there {
			killGroup(pid)
		}
	}
}

// guard is the agent's side of a guard process. A nil one guards nothing.
type guard struct {
	cmd *exec.Cmd

	mu    sync.Mutex
	input io.WriteCloser
}

// startGuard starts a guard. It is in a group of its own, and has none of the agent's outputs.
func startGuard(command []string) (*guard, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = os.Environ()
	separate(cmd, false)
	input, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("starting the process that ends the workers should this one be killed: %w", err)
	}
	return &guard{cmd: cmd, input: input}, nil
}

func (g *guard) add(pid int)    { g.tell("+", pid) }
func (g *guard) remove(pid int) { g.tell("-", pid) }

func (g *guard) tell(what string, pid int) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	_, _ = fmt.Fprintf(g.input, "%s%d\n", what, pid) // a guard that is gone guards no more: the kernel still kills the workers themselves
}

func (g *guard) close() {
	if g == nil {
		return
	}
	g.input.Close()
	_ = g.cmd.Wait()
}
