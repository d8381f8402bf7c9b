//go:build unix

package collective_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/transport/mixed"
)

// TestChaosOnProcesses runs random programs, as TestChaosOnSimnet does, with real processes that share memory or are
// joined by TCP, and are killed and stopped by signals. With -programs 200 it runs as many.
func TestChaosOnProcesses(t *testing.T) {
	t.Parallel()
	ended := map[string]int{}
	chaosSeeds(t, 10, 4, chaosRanksMax, func() bool { return true }, func(p *chaosProgram) error {
		err := p.fork(ended)
		if err != nil {
			chaosFailed(t, p, err)
		}
		return err
	})
	t.Logf("how ranks ended: %v", ended)
}

// chaosProcess is a child of the test.
type chaosProcess struct {
	io.Reader
	io.Writer
	cmd   *exec.Cmd
	lines *bufio.Reader
	ranks []int
}

// fork runs the program with real processes, counts how ranks ended, and returns an error if that is wrong.
func (p *chaosProgram) fork(ended map[string]int) (err error) {
	var children []*chaosProcess
	defer func() {
		for _, c := range children {
			c.cmd.Process.Kill() // it may have exited
			c.cmd.Wait()
		}
	}()
	var streams []io.ReadWriter
	for i, ranks := range p.processes() {
		c, err := p.child(i, ranks)
		if err != nil {
			return err
		}
		children = append(children, c)
		streams = append(streams, c)
	}
	hung := false
	watchdog := time.AfterFunc(5*time.Minute, func() {
		hung = true
		for _, c := range children {
			c.cmd.Process.Signal(syscall.SIGQUIT) // they write where they hang, and end
			if p.loses(c.ranks[0]) {
				c.cmd.Process.Kill()
			}
		}
	})
	defer func() {
		if watchdog.Stop(); hung {
			err = fmt.Errorf("it hangs; %w", err)
		}
	}()
	if len(children) > 1 {
		if err := mixed.Collect(streams); err != nil {
			return err
		}
	}
	return p.conduct(children, ended)
}

func (p *chaosProgram) child(process int, ranks []int) (*chaosProcess, error) {
	c := &chaosProcess{cmd: exec.Command(os.Args[0]), ranks: ranks}
	c.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d", chaosChildEnv, p.seed, process))
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if c.Writer, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	c.lines = bufio.NewReader(out)
	c.Reader = c.lines
	return c, c.cmd.Start()
}

// expect reads a line, which must begin with what, and returns the rest.
func (c *chaosProcess) expect(what string) (string, error) {
	line, err := c.lines.ReadString('\n')
	rest, ok := strings.CutPrefix(strings.TrimSpace(line), what)
	if err != nil || !ok {
		return "", fmt.Errorf("ranks %v printed %q, want %q (%v)", c.ranks, line, what, err)
	}
	return strings.TrimSpace(rest), nil
}

// conduct starts the ready processes, injects the fault, and reads how their ranks end.
func (p *chaosProgram) conduct(children []*chaosProcess, ended map[string]int) error {
	for _, c := range children {
		if _, err := c.expect("ready"); err != nil {
			return err
		}
	}
	for _, c := range children {
		fmt.Fprintln(c, "go")
	}
	if p.fault != nil && (p.fault.Kind == simnet.Kill || p.fault.Kind == simnet.Stop) {
		time.Sleep(10 * p.fault.At)
		for _, c := range children {
			switch {
			case !p.loses(c.ranks[0]):
			case p.fault.Kind == simnet.Kill:
				c.cmd.Process.Kill()
			default:
				c.cmd.Process.Signal(syscall.SIGSTOP)
			}
		}
	}
	errs := make([]error, len(children))
	var mu sync.Mutex
	read := func(i int, what string) {
		for range children[i].ranks {
			kind, err := children[i].expect(what)
			mu.Lock()
			if ended[kind]++; err != nil {
				errs[i] = err
			}
			mu.Unlock()
		}
	}
	var wg sync.WaitGroup
	for i, c := range children {
		if !p.loses(c.ranks[0]) {
			wg.Go(func() { read(i, "ended:") })
		}
	}
	wg.Wait()
	for i, c := range children {
		if p.loses(c.ranks[0]) {
			continue
		}
		fmt.Fprintln(c, "leave")
		if rest, _ := io.ReadAll(c.lines); len(rest) > 0 && errs[i] == nil {
			errs[i] = fmt.Errorf("ranks %v printed %q", c.ranks, rest)
		}
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
