package monitor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/dashboard"
	"github.com/lockstep-ml/lockstep/internal/terminal"
)

// topFlags are the flags of lockstep top.
type topFlags struct {
	every  time.Duration
	once   bool
	format string
}

// NewTop returns lockstep top.
func NewTop() *cobra.Command {
	var o topFlags
	cmd := &cobra.Command{
		Use:   "top [flags] [JOB | ADDRESS]",
		Short: "Show a running job in the terminal",
		Long: `Top shows the workers of a running job: what they do, where the time of a step
goes, which one slows the others down.

JOB is the name of a job of this user on this host, or its first letters:
lockstep run shows its jobs on the host where it was started (node 0), lockstep
train on the host of worker 0. Without a name the only job is shown, or the
names of all. A name with a colon or a slash must be given whole. On another
host, use 'ssh -t host lockstep top'.

ADDRESS is that of the job's dashboard, as lockstep run --dashboard or lockstep
train --dashboard prints it. If it needs a token, give the whole address, or set
` + TokenEnv + `.`,
		Example: `  lockstep top
  lockstep top run-20260102-150405-4711
  lockstep top --once --format json localhost:8080`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return cli.Usagef("%s given: want the name of a job, or the address of a dashboard, such as localhost:8080",
					cli.Count(len(args), "argument"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			in := cli.CatchInterrupts(cmd.Context())
			defer in.Close()
			err := o.run(in, cmd.OutOrStdout(), args)
			if in.Interrupted.Load() {
				return nil // this is how top ends
			}
			return err
		},
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			var names []string
			jobs, _ := dashboard.LocalJobs(cmd.Context()) // else there is nothing to complete
			for _, j := range jobs {
				names = append(names, j.Name)
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.DurationVar(&o.every, "every", time.Second, "`time` between two tables")
	f.BoolVar(&o.once, "once", false, "show one table and exit")
	cli.ChoiceVar(f, &o.format, "format", "table", "table or json (one document of the dashboard's form a line)",
		"table", "json")
	cli.Limit(f, "[100ms,)", "every")
	return cmd
}

func (o *topFlags) run(ctx context.Context, out io.Writer, args []string) error {
	query, err := findJob(ctx, args)
	if err != nil {
		return err
	}
	var job status.Job
	var screen *display
	if file, ok := out.(*os.File); ok && terminal.CanRedraw(file) && !o.once && o.format == "table" {
		screen = newDisplay(file, func(columns, rows int) []string { return jobLines(&job, columns, rows-1) })
		defer screen.close(true)
	}
	for first := true; ; first = false {
		m, text, err := query.Read(ctx, o.format == "json")
		switch {
		case err != nil && ctx.Err() != nil:
			return err
		case err != nil && !first:
			return fmt.Errorf("the job has ended, or cannot be reached any more: %s", printable(err.Error()))
		case err != nil:
			return errors.New(printable(err.Error())) // it may have any text of the server
		}
		job = m.Job
		switch {
		case o.format == "json":
			_, err = fmt.Fprintf(out, "%s\n", strings.TrimSpace(string(text)))
		case screen != nil:
			err = screen.redraw()
		default:
			_, err = fmt.Fprintln(out, strings.Join(jobLines(&job, 0, 0), "\n"))
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

// findJob returns the query for the job that the arguments name.
func findJob(ctx context.Context, args []string) (*dashboard.Query, error) {
	if len(args) == 1 && strings.Contains(args[0], "://") {
		return queryOf(args[0])
	}
	jobs, err := dashboard.LocalJobs(ctx)
	if len(args) == 1 && strings.ContainsAny(args[0], ":/") { // a name may have these too
		if !slices.ContainsFunc(jobs, func(j dashboard.LocalJob) bool { return j.Name == args[0] }) {
			return queryOf(args[0])
		}
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, j := range jobs {
		names = append(names, j.Name)
	}
	if len(args) == 1 {
		exact := slices.ContainsFunc(jobs, func(j dashboard.LocalJob) bool { return j.Name == args[0] })
		jobs = slices.DeleteFunc(jobs, func(j dashboard.LocalJob) bool {
			return exact && j.Name != args[0] || !strings.HasPrefix(j.Name, args[0])
		})
	}
	switch {
	case len(names) == 0:
		return nil, errors.New("no job of this user runs on this host: want the address of a job's dashboard, such as " +
			"localhost:8080, or run lockstep top on the host where the job was started")
	case len(jobs) == 0:
		return nil, cli.Usagef("no job %s of this user runs on this host, but %s: want one of them, or the address of a "+
			"dashboard, such as localhost:8080", args[0], strings.Join(names, ", "))
	case len(jobs) > 1:
		names = names[:0]
		for _, j := range jobs {
			names = append(names, j.Name)
		}
		return nil, cli.Usagef("%d jobs of this user run on this host: name one of %s", len(jobs), strings.Join(names, ", "))
	}
	return jobs[0].Query, nil
}

// queryOf returns the query for the job of a dashboard's address.
func queryOf(address string) (*dashboard.Query, error) {
	url, token, err := jobAddress(address, os.Getenv(TokenEnv))
	return dashboard.NewQuery(url, token), err
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
		return "", "", cli.Usagef("%s: want the address of a dashboard, such as localhost:8080", address)
	}
	if given := u.Query().Get("token"); given != "" {
		token = given
	}
	u.Path, u.RawQuery = "/api/job", ""
	return u.String(), token, nil
}
