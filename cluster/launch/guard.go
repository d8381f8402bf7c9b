package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// Guard is the main function of the process started by [Config].Guard. It reads process groups and temporary
// folders from its input. At the input's end, when its agent has died, it kills and removes those that are
// left. Only SIGKILL ends it before that.
func Guard(input io.Reader) {
	signal.Ignore(sigInterrupt, sigTerminate)
	left := map[string]bool{}
	for s := bufio.NewScanner(input); s.Scan(); {
		if what, there := strings.CutPrefix(s.Text(), "+"); there {
			left[what] = true
		} else {
			delete(left, strings.TrimPrefix(s.Text(), "-"))
		}
	}
	var folders []string
	var groups []int
	for what := range left {
		if pid, err := strconv.Atoi(what); err != nil {
			folders = append(folders, what)
		} else if pid > 1 {
			killGroup(pid)
			groups = append(groups, pid)
		}
	}
	// Until they have ended, they may write records: a store of this agent's process has ended with it.
	for _, pid := range groups {
		awaitGroup(pid)
	}
	for _, folder := range folders {
		if strings.HasPrefix(filepath.Base(folder), recordsPrefix) {
			_ = os.RemoveAll(folder)
		}
	}
}

// recordsPrefix is the prefix of the names of temporary folders for records.
const recordsPrefix = "lockstep-records-"

// guard is the agent's side of a guard process. A nil one guards nothing.
type guard struct {
	cmd *exec.Cmd

	mu    sync.Mutex
	input io.WriteCloser
}

// startGuard starts a guard, in a separate process group and without the agent's outputs.
func startGuard(command []string) (*guard, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = os.Environ()
	separate(cmd, false)
	input, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("starting the guard process: %w", err)
	}
	return &guard{cmd: cmd, input: input}, nil
}

// add registers a process group, by its number, or a folder with the guard; remove unregisters it.
func (g *guard) add(what any)    { g.send("+", what) }
func (g *guard) remove(what any) { g.send("-", what) }

func (g *guard) send(sign string, what any) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	_, _ = fmt.Fprintf(g.input, "%s%v\n", sign, what) // without a guard the kernel still kills the workers
}

func (g *guard) close() {
	if g == nil {
		return
	}
	g.input.Close()
	_ = g.cmd.Wait()
}
