package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/dashboard"
	"github.com/lockstep-ml/lockstep/timeline"
)

// dashboardTokenEnv names the token of the page.
const dashboardTokenEnv = "LOCKSTEP_DASHBOARD_TOKEN"

// dashboardEvery is how often the state of a job is read.
const dashboardEvery = 200 * time.Millisecond

// dashboardFlags are the flags of the live page.
type dashboardFlags struct{ address, metrics string }

func (o *dashboardFlags) add(f *pflag.FlagSet, who string) {
	f.StringVar(&o.address, "dashboard", "", "serve a live page about the job at this `address`, such as :8080 "+
		"(loopback) or 0.0.0.0:8080 (with a token)"+who)
	f.StringVar(&o.metrics, "metrics", "", "serve metrics of the job for Prometheus at /metrics of this `address`, as "+
		"--dashboard does too"+who)
}

func (o *dashboardFlags) check(given func(flag string) bool) error {
	for flag, address := range map[string]string{"dashboard": o.address, "metrics": o.metrics} {
		if _, port, err := net.SplitHostPort(address); given(flag) && (err != nil || port == "") {
			return usagef("--%s %q: want host:port, such as localhost:8080, or :8080 for loopback", flag, address)
		}
	}
	return nil
}

// given reports whether a server is requested.
func (o *dashboardFlags) given() bool { return o.address != "" || o.metrics != "" }

// live serves the state of a job to those who watch it: the live page, and lockstep top.
type live struct {
	servers []*dashboard.Server
	stop    []context.CancelFunc
	feeds   sync.WaitGroup
	table   *liveTable // nil: none
}

// open serves a job: to lockstep top, which finds it by its name, and at the addresses of the flags.
func (o *dashboardFlags) open(job string, source dashboard.Source) (*live, error) {
	l := &live{}
	switch server, err := dashboard.ListenLocal(job, source); {
	case err == nil:
		l.servers = append(l.servers, server)
	case !errors.Is(err, dashboard.ErrServed): // by lockstep run, for its workers
		fmt.Fprintf(os.Stderr, "lockstep: lockstep top cannot find this job: %v\n", err)
	}
	for _, s := range []struct {
		flag, address, path string
		listen              func(string, dashboard.Source, string) (*dashboard.Server, error)
	}{
		{"dashboard", o.address, "", dashboard.Listen},
		{"metrics", o.metrics, "metrics", dashboard.ListenMetrics},
	} {
		if s.address == "" {
			continue
		}
		server, err := s.listen(s.address, source, os.Getenv(dashboardTokenEnv))
		if err != nil {
			l.close()
			return nil, fmt.Errorf("--%s %s: %w", s.flag, s.address, err)
		}
		l.servers = append(l.servers, server)
		address, token, _ := strings.Cut(server.URL(), "?")
		if token != "" {
			token = "?" + token
		}
		fmt.Fprintf(os.Stderr, "lockstep: %s at %s%s%s\n", s.flag, address, s.path, token)
	}
	return l, nil
}

// feed runs f, which keeps the state up to date, until close.
func (l *live) feed(f func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	l.stop = append(l.stop, cancel)
	l.feeds.Go(func() { f(ctx) })
}

// close ends the servers and feeds, and removes the table. Closing again does nothing.
func (l *live) close() {
	l.table.close()
	for _, stop := range l.stop {
		stop()
	}
	l.feeds.Wait()
	for _, server := range l.servers {
		server.Close()
	}
	l.stop, l.servers, l.table = nil, nil, nil
}

// followStore keeps a tracker up to date from the store of a job, until ctx ends. A lost store may come back.
func followStore(ctx context.Context, s rendezvous.Store, job string, t *status.Tracker) {
	for ctx.Err() == nil {
		if err := status.Follow(ctx, s, job, t, dashboardEvery); err != nil {
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		}
	}
}

// localSource is the state of the only worker of a job, read for each request.
type localSource struct {
	*status.Tracker

	recorder *timeline.Recorder
}

// Job returns the state now.
func (s *localSource) Job() status.Job {
	s.Tracker.Report(0, status.LocalReport(s.recorder))
	return s.Tracker.Job()
}

// serveDashboard serves the state of the training, on the chief.
func (r *trainRun) serveDashboard() (*live, error) {
	flags := &r.flags.dashboard
	if !r.chief {
		return &live{}, nil
	}
	if r.worker != nil && r.worker.Status() != nil {
		return flags.open(r.worker.Job().ID, r.worker.Status())
	}
	job := os.Getenv(cluster.EnvJob)
	if job == "" {
		job = newJobID("train", time.Now(), os.Getpid())
	}
	t := status.NewTracker(job, nil)
	recorder := r.strategy.Timeline()
	l, err := flags.open(job, &localSource{t, recorder})
	if err == nil && flags.given() { // for the charts, also while no page is open
		l.feed(func(ctx context.Context) { status.FollowLocal(ctx, recorder, t, dashboardEvery) })
	}
	return l, err
}
