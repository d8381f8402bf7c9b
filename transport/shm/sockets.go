package shm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// Without shared memory the ranks exchange frames over unix sockets with the protocol of package tcp. Every rank
// listens at a separate path, in a directory that only this user can access.

// openFrames implements Open without shared memory.
func openFrames(ctx context.Context, cfg Config) ([]transport.Endpoint, error) {
	dir, err := privateDir()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(cfg.Name))
	at := filepath.Join(dir, hex.EncodeToString(sum[:8]))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ends := make([]transport.Endpoint, len(cfg.Ranks))
	var wg sync.WaitGroup
	for i, rank := range cfg.Ranks {
		wg.Go(func() {
			var err error
			if ends[i], err = openRank(ctx, &cfg, at, rank); err != nil {
				cancel(err) // the first one counts
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		for _, e := range ends {
			if e != nil {
				e.Close()
			}
		}
		return nil, err
	}
	return ends, nil
}

// openRank joins one rank. Each rank has a separate node, even if several are in one process: the others do not know
// which are.
func openRank(ctx context.Context, cfg *Config, at string, rank int) (transport.Endpoint, error) {
	l, err := listenUnix(at + "-" + strconv.Itoa(rank))
	if err != nil {
		return nil, fmt.Errorf("shm: rank %d of %q: %w", rank, cfg.Name, err)
	}
	node, err := tcp.Listen(tcp.Config{
		Listener: l,
		Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", at+"-"+strings.TrimPrefix(address, unixHost+":"))
		},
		Job:          cfg.Job,
		Authenticate: cfg.Authenticate,
	})
	if err != nil {
		l.Close()
		return nil, err
	}
	addrs := make([]string, cfg.Size)
	for r := range addrs {
		addrs[r] = unixHost + ":" + strconv.Itoa(r)
	}
	ends, err := node.Group(ctx, tcp.GroupConfig{ID: cfg.Group, Epoch: cfg.Epoch, Addrs: addrs, Local: []int{rank}})
	if err != nil {
		node.Close()
		return nil, fmt.Errorf("shm: rank %d of %q: %w", rank, cfg.Name, err)
	}
	return (&sharedNode{node: node}).end(ends[0]), nil
}

// unixHost is the host in the addresses of the ranks.
const unixHost = "unix"

// privateDir returns the directory of this user's sockets.
func privateDir() (string, error) {
	dir := filepath.Join(os.TempDir(), "lockstep-"+strconv.Itoa(os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("shm: creating a directory for sockets: %w", err)
	}
	if err := checkPrivate(dir); err != nil {
		return "", err
	}
	return dir, nil
}

// listenUnix listens at the path. It removes a stale socket of an ended process.
func listenUnix(path string) (net.Listener, error) {
	l, err := net.Listen("unix", path)
	if err == nil {
		return l, nil
	}
	if c, dialErr := net.Dial("unix", path); dialErr == nil {
		c.Close()
		return nil, fmt.Errorf("another process on this host has opened it: %w", err)
	}
	if os.Remove(path) != nil {
		return nil, err
	}
	return net.Listen("unix", path)
}

// sharedNode is a rank's node, which is closed with the last endpoint of the rank.
type sharedNode struct {
	node *tcp.Node
	open atomic.Int64
}

// unixEnd is a rank's end.
type unixEnd struct {
	transport.Endpoint // of package tcp
	shared             *sharedNode
	closed             atomic.Bool
}

func (d *sharedNode) end(e transport.Endpoint) transport.Endpoint {
	d.open.Add(1)
	return &unixEnd{Endpoint: e, shared: d}
}

func (e *unixEnd) Transport() string { return "unix" }

func (e *unixEnd) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	sub, err := e.Endpoint.Split(id, ranks)
	if err != nil {
		return nil, err
	}
	return e.shared.end(sub), nil
}

func (e *unixEnd) Close() error {
	if e.closed.Swap(true) {
		return nil
	}
	err := e.Endpoint.Close()
	if e.shared.open.Add(-1) == 0 {
		err = errors.Join(err, e.shared.node.Close())
	}
	return err
}
