package launch

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// ending is how a process ended.
type ending struct {
	code   int    // its exit code; 128 plus the signal number if a signal ended it
	signal string // "SIGKILL"; "": none
	core   bool   // it wrote a core dump
}

// worker is one process of this node.
type worker struct {
	rank    int
	cmd     *exec.Cmd
	err     error // it could not be started
	started time.Time
	tail    *tail
	ended   chan struct{} // closed when the process has ended; its output may still be read

	// Set before the worker is reported as ended.
	ending    ending
	at        time.Time
	signalled bool     // it had been asked to exit, or was killed
	killed    bool     // by this agent
	halted    []string // it was found stopped, with this last output; nil: it was not
	memory    memoryKills
}

// pid returns the process's number, 0 if there is none.
func (w *worker) pid() int {
	if w.err != nil {
		return 0
	}
	return w.cmd.Process.Pid
}

// halt records that the worker was found stopped.
func (w *worker) halt() {
	if w.halted == nil {
		last, _ := w.tail.lines()
		w.halted = append([]string{}, last...)
	}
}

// spec is the configuration of a worker process.
type spec struct {
	command []string
	dir     string
	env     []string
	cpus    []int
	logs    string // folder; "": none
	show    *Shown
	prefix  string
	grace   time.Duration
	// unlogged receives errors of writing a log.
	unlogged func(error)
}

// start starts a worker. A worker that cannot be started counts as ended: its failure is reported like any
// other. patience reports whether the worker's child processes may end by themselves after it. ended is
// called when all processes have ended.
func start(s spec, rank int, st *starter, g *guard, scr *screen, patience *atomic.Bool, ended func(*worker)) *worker {
	w := &worker{rank: rank, tail: &tail{}, ended: make(chan struct{})}
	w.cmd = exec.Command(s.command[0], s.command[1:]...)
	w.cmd.Dir, w.cmd.Env = s.dir, s.env
	separate(w.cmd, true)
	outs, err := w.openStreams(s, scr)
	if err == nil {
		st.do(func() { affinity.Run(s.cpus, func() { err = w.cmd.Start() }) })
	}
	w.started = time.Now()
	for i := range outs {
		outs[i].write.Close()
	}
	if err != nil {
		for i := range outs {
			outs[i].close()
		}
		w.err, w.at, w.ending = err, w.started, ending{code: startCode(err)}
		close(w.ended)
		go ended(w)
		return w
	}
	g.add(w.pid())
	var copying sync.WaitGroup
	for i := range outs {
		copying.Go(func() { outs[i].copy(w.ended) })
	}
	go func() {
		w.wait(patience, s.grace, scr)
		g.remove(w.pid())
		close(w.ended)
		copying.Wait()
		ended(w)
	}()
	return w
}

// startCode returns the exit code of shells for a program that cannot be started.
func startCode(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return 127
	}
	return 126
}

const (
	leftoverPoll = 10 * time.Millisecond // interval of polling the processes that a worker left behind
	killedWithin = 5 * time.Second       // only a process stuck in the kernel takes longer to die
)

// wait waits for the process, and then for the processes that it left behind in its group: not at all, or,
// when the job ends in order, until it is asked to kill them.
func (w *worker) wait(patience *atomic.Bool, grace time.Duration, scr *screen) {
	pid := w.pid()
	known := awaitEnd(pid)
	at := time.Now() // before the number can be free: consequences of its end are later
	if known && !patience.Load() {
		killGroup(pid) // while the number is still the worker's
	}
	_ = w.cmd.Wait() // the state has all information
	if !known {
		at = time.Now()
	}
	w.at, w.ending = at, endingOf(w.cmd.ProcessState)
	for reported := false; patience.Load() && groupLives(pid); time.Sleep(leftoverPoll) {
		if !reported && time.Since(w.at) > grace {
			reported = true
			members, _ := groupMembers(os.DirFS("/"), pid)
			scr.print(fmt.Sprintf("lockstep run: worker %d (pid %d) has ended, but its child processes still run: process "+
				"group %d, with %v; waiting for them; Ctrl-C kills them\n", w.rank, pid, pid, members))
		}
	}
	killGroup(pid)
	awaitGroup(pid)
}

// awaitGroup waits until all processes of a killed group have ended.
func awaitGroup(pid int) {
	for end := time.Now().Add(killedWithin); groupLives(pid) && time.Now().Before(end); {
		time.Sleep(leftoverPoll)
	}
}

// outlet is one stream of a worker: the pipe, and its destinations.
type outlet struct {
	read, write *os.File
	log         *os.File
	unlogged    func(error)
	lines       *lines
}

func (w *worker) openStreams(s spec, scr *screen) (outs []*outlet, err error) {
	defer func() {
		if err != nil {
			for _, o := range outs {
				o.close()
			}
			outs = nil
		}
	}()
	for stream := Stdout; stream <= Stderr; stream++ {
		o := &outlet{}
		if o.read, o.write, err = os.Pipe(); err != nil {
			return outs, err
		}
		outs = append(outs, o)
		if s.logs != "" {
			name := filepath.Join(s.logs, fmt.Sprintf("rank%d.%s.log", w.rank, stream))
			if o.log, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644); err != nil {
				return outs, err
			}
		}
		o.unlogged = s.unlogged
		o.lines = &lines{emit: func(line []byte) {
			if stream == Stderr {
				w.tail.add(line)
			}
			if s.show.has(w.rank, stream) {
				scr.line(stream, s.prefix, line)
			}
		}}
	}
	w.cmd.Stdout, w.cmd.Stderr = outs[Stdout].write, outs[Stderr].write
	return outs, nil
}

func (o *outlet) close() {
	for _, f := range []*os.File{o.read, o.write, o.log} {
		if f != nil {
			f.Close()
		}
	}
}

// copy copies the stream until its end.
func (o *outlet) copy(ended <-chan struct{}) {
	var to io.Writer = o.lines
	if o.log != nil {
		// a full disk does not block the terminal, nor a paused terminal the log
		to = io.MultiWriter(logWriter{o}, o.lines)
	}
	copyStream(o.read, ended, to)
	o.lines.flush()
	o.close()
}

// logWriter writes into a log, and continues when that fails.
type logWriter struct{ *outlet }

func (l logWriter) Write(p []byte) (int, error) {
	if _, err := l.log.Write(p); err != nil {
		l.unlogged(err)
	}
	return len(p), nil
}

// record returns how the worker ended as far as its launcher can tell; false: it ended normally.
func (w *worker) record(grace time.Duration) (failure.Record, bool) {
	r := failure.Record{Worker: w.rank, PID: w.pid(), Time: w.at, Step: -1, ExitCode: w.ending.code}
	_, crash := w.tail.lines()
	switch kind, message := crashed(crash); {
	case w.halted != nil:
		r.Kind, r.Message, r.ExitCode = "signal", "stopped (by SIGSTOP or a debugger), so it made no progress and did not "+
			"exit", codeStopped
	case w.err != nil:
		r.Kind, r.Message = "error", "could not be started: "+w.err.Error()
		if errors.Is(w.err, exec.ErrNotFound) {
			r.Message += " (" + os.Getenv("PATH") + "): give the path of the program"
		}
	case w.ending.code == 0:
		return r, false
	case w.killed && w.ending.signal == "SIGKILL":
		r.Kind, r.Message = "interrupted", fmt.Sprintf("killed, since it had not exited %v after it was asked to", grace)
	case w.signalled && w.ending.signal != "SIGKILL":
		r.Kind, r.Message = "interrupted", "asked to exit, and ended with "+w.ending.String()
	case w.ending.signal == "SIGKILL" && w.memory.count > 0:
		r.Kind, r.Message = "memory", fmt.Sprintf("out of memory: killed by the kernel (SIGKILL; since the start it has "+
			"killed %d of %s for that)", w.memory.count, w.memory.where)
	case w.ending.signal == "SIGKILL":
		r.Kind, r.Message = "signal", "killed by SIGKILL, which lockstep run did not send"
	case kind != "":
		r.Kind, r.Message, r.Stack = kind, message, joinLines(crash)
	case w.ending.signal != "":
		r.Kind, r.Message = "signal", "ended by "+w.ending.String()
	default:
		r.Kind, r.Message = "exit", "ended with "+w.ending.String()
	}
	return r, true
}

func (e ending) String() string {
	switch {
	case e.signal == "":
		return fmt.Sprintf("exit code %d", e.code)
	case e.core:
		return e.signal + ", with a core dump"
	}
	return e.signal
}
