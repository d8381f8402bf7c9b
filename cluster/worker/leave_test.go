package worker

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/collective"
)

// cutStore is a store that can be cut off: then no call is answered.
type cutStore struct {
	rendezvous.Store
	cut    atomic.Bool
	closed chan struct{}
}

func (s *cutStore) wait(ctx context.Context) error {
	if !s.cut.Load() {
		return nil
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.closed:
		return rendezvous.ErrClosed
	}
}

func (s *cutStore) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	if err := s.wait(ctx); err != nil {
		return nil, 0, err
	}
	return s.Store.Get(ctx, key)
}

func (s *cutStore) Set(ctx context.Context, key string, value []byte) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.Store.Set(ctx, key, value)
}

func (s *cutStore) List(ctx context.Context, prefix string) ([]rendezvous.Entry, uint64, error) {
	if err := s.wait(ctx); err != nil {
		return nil, 0, err
	}
	return s.Store.List(ctx, prefix)
}

func (s *cutStore) Changes(ctx context.Context, prefix string, after uint64) ([]rendezvous.Entry, uint64, error) {
	entries, revision, err := s.Store.Changes(ctx, prefix, after)
	if wrong := s.wait(ctx); err == nil && wrong != nil {
		return nil, 0, wrong
	}
	return entries, revision, err
}

func (s *cutStore) Close() error {
	select {
	case <-s.closed:
	default:
		close(s.closed)
	}
	return s.Store.Close()
}

// TestCutOff: a worker that is cut off ends after the heartbeat timeout, and does not wait for the store any more:
// neither to describe the failure, nor to report it, nor to leave.
func TestCutOff(t *testing.T) {
	for _, c := range []struct {
		name   string
		hosted bool
		worker int           // that the failure is about; -1: the store's silence ends the job
		after  time.Duration // of the cut, for a connection that ends
	}{
		{"the store of worker 0", false, -1, 0},
		{"a launcher's store", true, -1, 0},
		{"a connection ends first", true, 2, 29 * time.Second},
		{"worker 0's connection ends first", false, 0, 29 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg, err := Config{
					Job: &cluster.Job{
						ID: "cut", Worker: 1, Workers: 3, Store: "tcp://10.0.0.1:7070",
						Hosted: c.hosted,
					},
					Logger: slog.New(slog.DiscardHandler), Getenv: func(string) (string, bool) { return "", false },
				}.filled()
				if err != nil {
					t.Fatal(err)
				}
				s := &cutStore{Store: rendezvous.NewMemory().Open(), closed: make(chan struct{})}
				w := &Worker{cfg: cfg, job: cfg.Job, session: newSession()}
				w.store, w.infos = s, make([]decodedInfo, 3)
				w.progress.step.Store(-1)
				w.progress.phaseBegun = make(chan struct{}, 1)
				for i := range 3 {
					w.members = append(w.members, Member{Worker: i, Host: "h", PID: i, First: i, Replicas: 1})
				}
				working, stopWork := context.WithCancel(context.Background())
				w.stopWork = stopWork
				if err := w.startMonitoring(working, nil); err != nil {
					t.Fatal(err)
				}
				nodes, _ := w.nodes()
				others, leave := context.WithCancel(t.Context()) // the others go on
				for _, i := range []int{0, 2} {
					other := membership.NewMember(membership.MemberConfig{
						Store: s.Store, Key: w.key("heartbeats"), Worker: i, Nodes: nodes, File: membership.NewMemoryFile(1),
						Timing: membership.NewTiming(cfg.HeartbeatTimeout, 3),
						State:  func() membership.Heartbeat { return membership.Heartbeat{} },
					})
					w.work.Go(func() { other.Run(others) })
				}
				time.Sleep(10*time.Second + 300*time.Millisecond)
				begin := time.Now()
				s.cut.Store(true)
				if c.worker < 0 {
					<-w.life.Done()
					err = w.Err()
				} else {
					time.Sleep(c.after)
					e := &collective.Error{
						Kind: collective.ErrPeerLost, Rank: 1, Peers: []int{c.worker},
						Err: errors.New("the connection ended"),
					}
					e.Who = w.describe(e)
					err = e
				}
				if found := time.Since(begin); found > cfg.HeartbeatTimeout+3*time.Second {
					t.Errorf("found after %v", found)
				}
				leave()
				found := time.Now()
				if w.Fail(err) == nil {
					t.Error("the failure was not reported, and no error says that")
				}
				_ = w.Close()
				if took := time.Since(found); took > time.Second/2 {
					t.Errorf("it takes %v to leave once the failure is known", took)
				}
				if total := time.Since(begin); total > cfg.HeartbeatTimeout+3*time.Second {
					t.Errorf("it takes %v in all", total)
				}
			})
		})
	}
}
