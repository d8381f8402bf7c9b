// Package monitor shows the state of a running job: in a table on the terminal, to lockstep top, and on the live page.
package monitor

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

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/dashboard"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// TokenEnv names the token of the page.
const TokenEnv = "LOCKSTEP_DASHBOARD_TOKEN"

// Every is how often the state of a job is read.
const Every = 200 * time.Millisecond

// Flags are the flags of the live page.
type Flags struct{ address, metrics string }

// Add adds the flags. who follows their descriptions: which process serves the page.
func (o *Flags) Add(f *pflag.FlagSet, who string) {
	f.StringVar(&o.address, "dashboard", "", "serve a live page at this `address`, such as :8080"+who)
	f.StringVar(&o.metrics, "metrics", "", "serve metrics for Prometheus at this `address`"+who)
}

// Check validates the flags.
func (o *Flags) Check(given func(flag string) bool) error {
	for flag, address := range map[string]string{"dashboard": o.address, "metrics": o.metrics} {
		if _, port, err := net.SplitHostPort(address); given(flag) && (err != nil || port == "") {
			return cli.Usagef("--%s %q: want host:port, such as localhost:8080, or :8080 for loopback", flag, address)
		}
	}
	return nil
}

// Given reports whether a server is requested.
func (o *Flags) Given() bool { return o.address != "" || o.metrics != "" }

// Service serves the state of a job to those who watch it: the live page, and lockstep top.
type Service struct {
	Servers []*dashboard.Server
	stop    []context.CancelFunc
	feeds   sync.WaitGroup
	Table   *Table // nil: none
}

// Open serves a job: to lockstep top, which finds it by its name, and at the addresses of the flags.
func (o *Flags) Open(job string, source dashboard.Source) (*Service, error) {
	l := &Service{}
	switch server, err := dashboard.ListenLocal(job, source); {
	case err == nil:
		l.Servers = append(l.Servers, server)
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
		server, err := s.listen(s.address, source, os.Getenv(TokenEnv))
		if err != nil {
			l.Close()
			return nil, fmt.Errorf("--%s %s: %w", s.flag, s.address, err)
		}
		l.Servers = append(l.Servers, server)
		address, token, _ := strings.Cut(server.URL(), "?")
		if token != "" {
			token = "?" + token
		}
		fmt.Fprintf(os.Stderr, "lockstep: %s at %s%s%s\n", s.flag, address, s.path, token)
	}
	return l, nil
}

// Feed runs f, which keeps the state up to date, until close.
func (l *Service) Feed(f func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	l.stop = append(l.stop, cancel)
	l.feeds.Go(func() { f(ctx) })
}

// Close ends the servers and feeds, and removes the table. Closing again does nothing.
func (l *Service) Close() {
	l.Table.close()
	for _, stop := range l.stop {
		stop()
	}
	l.feeds.Wait()
	for _, server := range l.Servers {
		server.Close()
	}
	l.stop, l.Servers, l.Table = nil, nil, nil
}

// Follow keeps a tracker up to date from the store of a job, until ctx ends. A lost store may come back.
func Follow(ctx context.Context, s rendezvous.Store, job string, t *status.Tracker) {
	for ctx.Err() == nil {
		if err := status.Follow(ctx, s, job, t, Every); err != nil {
			_ = pause.For(ctx, time.Second) // the loop ends with ctx
		}
	}
}
