package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/dashboard"
)

// topFlags are the flags of lockstep top.
type topFlags struct {
	every  time.Duration
	once   bool
	format string
}

func newTop() *cobra.Command {
	var o topFlags
	cmd := &cobra.Command{
		Use:   "top [flags] ADDRESS",
		Short: "Show a running job in the terminal",
		Long: `Top shows the workers of a running job: what they do, where the time of a step
goes, which one slows the others down. ADDRESS is that of the job's dashboard,
as lockstep run --dashboard or lockstep train --dashboard prints it. If it needs
a token, give the whole address, or set ` + dashboardTokenEnv + `.`,
		Example: `  lockstep top localhost:8080
  lockstep top --once --format json localhost:8080`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("%s given: want the address of a dashboard, such as localhost:8080",
					count(len(args), "argument"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.every < 100*time.Millisecond:
				return usagef("--every %v: want at least 100ms", o.every)
			case o.format != "table" && o.format != "json":
				return usagef("--format %s: want table or json", o.format)
			}
			in := catchInterrupts(cmd.Context())
			defer in.close()
			err := o.run(in, cmd.OutOrStdout(), args[0])
			if in.interrupted.Load() {
				return nil // this is how top ends
			}
			return err
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.DurationVar(&o.every, "every", time.Second, "`time` between two tables")
	f.BoolVar(&o.once, "once", false, "show one table and exit")
	f.StringVar(&o.format, "format", "table", "table or json (one document of the dashboard's form a line)")
	return cmd
}

func (o *topFlags) run(ctx context.Context, out io.Writer, address string) error {
	query, token, err := jobAddress(address, os.Getenv(dashboardTokenEnv))
	if err != nil {
		return err
	}
	width, terminal := terminalWidth(out)
	for first := true; ; first = false {
		m, text, err := fetchJob(ctx, query, token)
		if err != nil && !first && ctx.Err() == nil {
			return fmt.Errorf("the job has ended, or cannot be reached any more: %w", err)
		}
		if err != nil {
			return err
		}
		switch {
		case o.format == "json":
			_, err = fmt.Fprintf(out, "%s\n", strings.TrimSpace(string(text)))
		case terminal && !o.once:
			_, err = fmt.Fprintf(out, "\x1b[H\x1b[2J%s", jobTable(&m.Job, width()))
		default:
			_, err = io.WriteString(out, jobTable(&m.Job, 0))
		}
		if err != nil || o.once {
			return err
		}
		select {
		case <-time.After(o.every):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// jobAddress returns the URL of a dashboard's JSON, and the token.
func jobAddress(address, token string) (string, string, error) {
	if !strings.Contains(address, "://") {
		if strings.HasPrefix(address, ":") {
			address = "localhost" + address
		}
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", "", usagef("%s: want the address of a dashboard, such as localhost:8080", address)
	}
	if given := u.Query().Get("token"); given != "" {
		token = given
	}
	u.Path, u.RawQuery = "/api/job", ""
	return u.String(), token, nil
}

// jobBytesMax bounds the answer of a dashboard.
const jobBytesMax = 64 << 20

func fetchJob(ctx context.Context, query, token string) (m dashboard.Message, text []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, query, nil)
	if err != nil {
		return m, nil, err
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return m, nil, fmt.Errorf("reaching the dashboard: %w", err)
	}
	defer answer.Body.Close()
	if text, err = io.ReadAll(io.LimitReader(answer.Body, jobBytesMax)); err != nil {
		return m, nil, fmt.Errorf("reading the dashboard's answer: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return m, nil, fmt.Errorf("%s answers %s: %s", query, answer.Status,
			strings.TrimSpace(string(text[:min(len(text), 300)])))
	}
	if err := json.Unmarshal(text, &m); err != nil || m.Job.Version != 1 {
		return m, nil, errors.Join(fmt.Errorf("%s is not the dashboard of a job, or of another version", query), err)
	}
	return m, text, nil
}

// jobTable formats the state of a job. Lines are clipped to the width, unless that is 0.
func jobTable(j *status.Job, width int) string {
	var b strings.Builder
	line := func(format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		if runes := []rune(text); width > 0 && len(runes) > width {
			text = string(runes[:width-1]) + "…"
		}
		b.WriteString(text + "\n")
	}
	head := fmt.Sprintf("%s: step %d, %.0f examples/s, %.1f ms a step", j.Job, j.Step, j.ExamplesPerSecond,
		1e3*j.StepSeconds)
	if t := j.Training; t != nil {
		head += fmt.Sprintf(", epoch %d", t.Epoch)
		if t.Epochs > 0 {
			head += fmt.Sprintf("/%d", t.Epochs)
		}
		if t.Loss != nil {
			head += fmt.Sprintf(", loss %.4g", *t.Loss)
		} else {
			head += ", loss not finite"
		}
	}
	if j.Restarts > 0 {
		head += ", " + count(j.Restarts, "restart")
	}
	line("%s", head)
	hosts := len("host")
	for i := range j.Workers {
		hosts = max(hosts, min(len(j.Workers[i].Host), 24))
	}
	line("%6s  %-*s  %-8s  %-10s %8s %8s %6s %6s %7s %9s %9s", "worker", hosts, "host", "state", "phase", "step",
		"own", "wait", "input", "CPUs", "memory", "heartbeat")
	for i := range j.Workers {
		w := &j.Workers[i]
		mark := ""
		if j.Straggler != nil && j.Straggler.Worker == w.Worker {
			mark = "  slow: " + j.Straggler.Cause
		}
		host := w.Host
		if len(host) > hosts {
			host = host[:hosts]
		}
		line("%6d  %-*s  %-8s  %-10s %8d %6.1fms %5.0f%% %5.0f%% %7.1f %9s %8.1fs%s", w.Worker, hosts, host, w.State, w.Phase,
			w.Step, 1e3*w.OwnSeconds, 100*w.Wait, 100*w.Input, w.CPUs, formatBytes(int(w.Memory)), w.HeartbeatAge, mark)
	}
	return b.String()
}
