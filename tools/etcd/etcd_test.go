package etcd_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/etcd"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/storetest"
)

// The server runs in a separate process, this test binary again, so that leaks of the client are visible.
const serverEnv = "LOCKSTEP_TEST_ETCD"

func TestMain(m *testing.M) {
	if text := os.Getenv(serverEnv); text != "" {
		if err := serve(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// serve is an etcd server until stdin ends, at a port and the next one, with a folder: text is "PORT FOLDER". It prints
// its address.
func serve(text string) error {
	cfg := embed.NewConfig()
	port, folder, _ := strings.Cut(text, " ")
	first, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	cfg.Dir, cfg.LogLevel = folder, "panic"
	client, peer := loopback(first), loopback(first+1)
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(3 * time.Minute):
		return errors.New("etcd is not ready within 3 minutes")
	}
	fmt.Println(client.Host)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// cluster starts an etcd server that ends with the test, and returns its address.
func cluster(t *testing.T) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", serverEnv, freeport.Take(t, 2), t.TempDir()))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the server: %v", err)
		}
	})
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the server did not start: %v", err)
	}
	return strings.TrimSpace(address)
}

// loopback is a URL of a port of loopback.
func loopback(port int) url.URL {
	return url.URL{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", port)}
}

func open(t *testing.T, url string) rendezvous.Store {
	t.Helper()
	s, err := rendezvous.Open(t.Context(), url, rendezvous.Config{Schemes: etcd.Schemes()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConformance(t *testing.T) {
	address := cluster(t)
	var stores atomic.Int32
	storetest.Run(t, storetest.Stores{Slow: true, New: func(t *testing.T) func() rendezvous.Store {
		url := fmt.Sprintf("etcd://%s/test/%d", address, stores.Add(1))
		return func() rendezvous.Store { return open(t, url) }
	}})
}

// TestCompacted: a reader of changes that etcd has compacted gets an error, and continues from the current revision.
func TestCompacted(t *testing.T) {
	address := cluster(t)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{address}, Context: t.Context()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	s := open(t, "etcd://"+address)
	defer s.Close()
	var revision uint64
	for range 3 {
		if err := s.Set(t.Context(), "k", nil); err != nil {
			t.Fatal(err)
		}
		if _, revision, err = s.List(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Compact(t.Context(), int64(revision)); err != nil {
		t.Fatal(err)
	}
	if entries, _, err := s.Changes(t.Context(), "k", 1); !errors.Is(err, rendezvous.ErrCompacted) {
		t.Errorf("got %v, %v", entries, err)
	}
	if err := s.Set(t.Context(), "k", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if entries, _, err := s.Changes(t.Context(), "k", revision); err != nil || len(entries) != 1 ||
		string(entries[0].Value) != "new" {
		t.Errorf("got %v, %v", entries, err)
	}
}

// TestJoin: workers join in etcd, and another job on it does not see them.
func TestJoin(t *testing.T) {
	address := cluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var work sync.WaitGroup
	for _, job := range []string{"a", "a/0"} {
		for w := range 3 {
			work.Go(func() {
				s := open(t, "etcd://"+address)
				defer s.Close()
				cards, err := rendezvous.Join(ctx, s, rendezvous.Registration{Job: job, Worker: w, Workers: 3, PID: 1 + w})
				if err != nil || len(cards) != 3 || cards[2].PID != 3 || cards[0].Job != job {
					t.Errorf("worker %d of job %s: %v, %v", w, job, cards, err)
					return
				}
				if err := rendezvous.Leave(ctx, s, cards[w]); err != nil {
					t.Error(err)
				}
				if w == 0 {
					if err := rendezvous.DeleteJob(ctx, s, job); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	work.Wait()
	s := open(t, "etcd://"+address)
	defer s.Close()
	if entries, _, err := s.List(ctx, ""); err != nil || len(entries) > 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// TestNoAnswer: a cluster that does not answer is an error when ctx ends, not before, which describes the attempts.
func TestNoAnswer(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	silent := loopback(freeport.Take(t, 1))
	_, err := rendezvous.Open(ctx, "etcd://"+silent.Host, rendezvous.Config{Schemes: etcd.Schemes()})
	if err == nil || ctx.Err() == nil {
		t.Fatalf("got %v", err)
	}
}
