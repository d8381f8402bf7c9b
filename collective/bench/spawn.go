package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/transport/mixed"
)

// WorkerCommand returns the command of one process. That process must call [Work] with the job. Its standard
// input and output belong to the measurement.
type WorkerCommand func(ctx context.Context, job string) *exec.Cmd

// job is the configuration of one process of a measurement. It is sent as JSON.
type job struct {
	Options Options
	Process int
	Name    string // a name that is unique among the measurements on this host
	Secret  string // of the processes, with TLS
}

// ranks returns the ranks of a process: balanced; the first processes have one more.
func (j *job) ranks() []int {
	each, more := j.Options.Ranks/j.Options.Processes, j.Options.Ranks%j.Options.Processes
	first := j.Process*each + min(j.Process, more)
	if j.Process < more {
		each++
	}
	ranks := make([]int, each)
	for i := range ranks {
		ranks[i] = first + i
	}
	return ranks
}

// child is a process of the measurement.
type child struct {
	cmd            *exec.Cmd
	io.WriteCloser // to its standard input
	io.Reader      // from its standard output
	stderr         bytes.Buffer
}

// spawn measures on several processes: it starts them, connects them to each other, and reads rank 0's
// results. It leaves no process behind.
func spawn(ctx context.Context, opts Options, report func(Result) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	name := fmt.Sprintf("bench-%d-%d", os.Getpid(), time.Now().UnixNano())
	var children []*child
	var links []io.ReadWriter
	var err error
	key := ""
	if opts.TLS {
		key = secret.New().Text()
	}
	cpus := affinity.Read()
	for i := range opts.Processes {
		var text []byte
		if text, err = json.Marshal(job{opts, i, name, key}); err != nil {
			break
		}
		c := &child{cmd: opts.Worker(ctx, string(text))}
		c.cmd.Stderr = &c.stderr
		if c.WriteCloser, err = c.cmd.StdinPipe(); err != nil {
			break
		}
		if c.Reader, err = c.cmd.StdoutPipe(); err != nil {
			break
		}
		affinity.Run(cpus.Of(opts.Bind, opts.Processes, i), func() { err = c.cmd.Start() })
		if err != nil {
			break
		}
		children, links = append(children, c), append(links, c)
	}
	rounds := 1
	if opts.Limit && opts.bareExchange() {
		rounds = 2
	}
	for range rounds {
		if err == nil {
			err = mixed.Collect(links)
		}
	}
	if err == nil {
		err = readResults(children[0], report)
	}
	if err != nil {
		cancel() // kills them
	}
	return errors.Join(waitAll(children, err)...)
}

// readResults reports what rank 0's process writes, one line of JSON per result.
func readResults(r io.Reader, report func(Result) error) error {
	d := json.NewDecoder(r)
	for {
		var result Result
		switch err := d.Decode(&result); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := report(result); err != nil {
			return err
		}
	}
}

// waitAll waits for the processes, and returns their error messages; the error err of this process only if
// there are none.
func waitAll(children []*child, err error) []error {
	var errs []error
	for i, c := range children {
		c.Close()
		e := c.cmd.Wait()
		if e == nil {
			continue
		}
		if text := strings.TrimSpace(c.stderr.String()); text != "" {
			errs = append(errs, fmt.Errorf("bench: process %d: %s", i, text))
		} else if err == nil {
			err = fmt.Errorf("bench: process %d: %w", i, e)
		}
	}
	if len(errs) == 0 && err != nil {
		return []error{err}
	}
	return errs
}

// Work is the part of one process of a measurement. r and w are its standard input and output.
func Work(ctx context.Context, text string, r io.Reader, w io.Writer) error {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return fmt.Errorf("bench: decoding the job: %w", err)
	}
	o := &j.Options
	t, ok := Transports[o.Transport]
	if !ok || t.Goroutines() || o.Processes < 1 || o.Ranks < o.Processes || j.Process < 0 || j.Process >= o.Processes {
		return fmt.Errorf("bench: invalid job for process %d of %d with %d ranks over %q", j.Process, o.Processes, o.Ranks,
			o.Transport)
	}
	parent := link{r, w}
	ends, err := t.join(ctx, &j, parent)
	if err != nil {
		return err
	}
	if o.Limit && o.bareExchange() {
		if o.bare, err = openBare(ctx, &j, mixed.Through(parent)); err != nil {
			for _, e := range ends {
				e.Close()
			}
			return err
		}
		defer o.bare.close()
	}
	group, err := collective.Open(ends, o.config())
	if err != nil {
		return err
	}
	out := json.NewEncoder(w)
	err = measureGroup(ctx, group, *o, func(r Result) error { return out.Encode(r) })
	if e := group.Close(); err == nil {
		err = e
	}
	return err
}

// link is both directions of the connection with the parent.
type link struct {
	io.Reader
	io.Writer
}
