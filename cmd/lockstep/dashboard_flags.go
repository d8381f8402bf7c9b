package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/spf13/pflag"

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
type dashboardFlags struct{ address string }

func (o *dashboardFlags) add(f *pflag.FlagSet, who string) {
	f.StringVar(&o.address, "dashboard", "", "serve a live page about the job at this `address`, such as :8080 "+
		"(loopback) or 0.0.0.0:8080 (with a token)"+who)
}

func (o *dashboardFlags) check(given func(flag string) bool) error {
	if !given("dashboard") {
		return nil
	}
	if _, port, err := net.SplitHostPort(o.address); err != nil || port == "" {
		return usagef("--dashboard %q: want host:port, such as localhost:8080, or :8080 for loopback", o.address)
	}
	return nil
}

// live is the live page of a job, and what feeds it.
type live struct {
	server *dashboard.Server
	stop   context.CancelFunc
	feed   sync.WaitGroup
}

// openLive serves the page of a tracker, which feed keeps up to date until its context ends; nil: nothing is needed.
func openLive(address string, t *status.Tracker, feed func(context.Context)) (*live, error) {
	server, err := dashboard.Listen(address, t, os.Getenv(dashboardTokenEnv))
	if err != nil {
		return nil, fmt.Errorf("--dashboard %s: %w", address, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &live{server: server, stop: cancel}
	if feed != nil {
		l.feed.Go(func() { feed(ctx) })
	}
	fmt.Fprintf(os.Stderr, "lockstep: dashboard at %s\n", server.URL())
	return l, nil
}

// close ends the page. A nil live has nothing to end.
func (l *live) close() {
	if l == nil {
		return
	}
	l.stop()
	l.feed.Wait()
	l.server.Close()
}

// followStore feeds a tracker from the store of a job. A lost store may come back.
func followStore(s rendezvous.Store, job string, t *status.Tracker) func(context.Context) {
	return func(ctx context.Context) {
		for ctx.Err() == nil {
			if err := status.Follow(ctx, s, job, t, dashboardEvery); err != nil {
				select {
				case <-time.After(time.Second):
				case <-ctx.Done():
				}
			}
		}
	}
}

// followLocal feeds a tracker from the recorder of this process.
func followLocal(r *timeline.Recorder, t *status.Tracker) func(context.Context) {
	return func(ctx context.Context) { status.FollowLocal(ctx, r, t, dashboardEvery) }
}

// serveDashboard serves the live page of the training, on the chief.
func (r *trainRun) serveDashboard() (*live, error) {
	address := r.flags.dashboard.address
	if address == "" || !r.chief {
		return nil, nil
	}
	if r.worker != nil && r.worker.Status() != nil {
		return openLive(address, r.worker.Status(), nil)
	}
	t := status.NewTracker("training of "+r.flags.model, nil)
	return openLive(address, t, followLocal(r.strategy.Timeline(), t))
}
