package launch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/etcd"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/internal/redact"
)

// StoreConfig configures the rendezvous store of a job's agents and workers.
type StoreConfig struct {
	// Backend is "tcp" (a store that node 0's agent serves), "etcd" or "file" (a folder).
	Backend string
	// Endpoint is the store's location: node 0's "host:port", etcd's "host:port,host:port/prefix", where each
	// host may have the prefix https://, or a folder that all nodes share. With Serve and tcp it is the
	// address to listen on; "" is any free port of 127.0.0.1.
	Endpoint string
	// ID names the job, and Secret, if given, encrypts and authenticates the connections to a TCP store.
	ID     string
	Secret secret.Secret
	// Serve serves a TCP store in this process, for that many Clients: workers and agents.
	Serve   bool
	Clients int
	// Logger receives the store's messages. Default slog.Default().
	Logger *slog.Logger
}

// JobStore is an open store, and its location.
type JobStore struct {
	Store rendezvous.Store
	// URL is the URL that is passed to the workers.
	URL string
	// Holder describes, for display, the process with which the store ends; "": none.
	Holder string

	server *rendezvous.Server
}

// Close closes the handle, and the store itself if it is served here.
func (p *JobStore) Close() error {
	err := p.Store.Close()
	if p.server != nil {
		err = errors.Join(err, p.server.Close())
	}
	return err
}

// Open opens the store, or serves it. It waits until ctx ends for a store that is served elsewhere.
func (m StoreConfig) Open(ctx context.Context) (*JobStore, error) {
	p, err := m.open(ctx)
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	return p, nil
}

func (m StoreConfig) open(ctx context.Context) (*JobStore, error) {
	switch {
	case m.Backend == "etcd":
		url, err := etcdURL(m.Endpoint)
		if err != nil {
			return nil, err
		}
		return m.dial(ctx, url)
	case m.Backend == "file":
		path, err := filepath.Abs(strings.TrimPrefix(m.Endpoint, "file://"))
		if err != nil {
			return nil, err
		}
		return m.dial(ctx, "file://"+filepath.ToSlash(path))
	}
	p, err := m.overTCP(ctx)
	if err == nil {
		p.Holder = "node 0's lockstep run"
	}
	return p, err
}

func (m StoreConfig) overTCP(ctx context.Context) (*JobStore, error) {
	if m.Serve {
		return m.serve(ctx)
	}
	return m.dial(ctx, "tcp://"+m.Endpoint)
}

// dial opens an existing store.
func (m StoreConfig) dial(ctx context.Context, where string) (*JobStore, error) {
	cfg := rendezvous.Config{Schemes: etcd.Schemes(), Logger: m.Logger}
	if m.Secret.Given() {
		var err error
		if cfg.TLS, err = m.Secret.TLS(m.ID, 0); err != nil {
			return nil, err
		}
		cfg.Authenticate = m.Secret.Authenticate(secret.Store, m.ID, 0)
	}
	store, err := rendezvous.Open(ctx, where, cfg)
	if err != nil {
		return nil, err
	}
	return &JobStore{Store: store, URL: where}, nil
}

// etcdURL returns the URL of a store in etcd: "etcds://host:port,host:port/prefix", or etcd:// if the
// endpoint has no https://.
func etcdURL(endpoint string) (string, error) {
	scheme, prefix, hosts := "etcd", "lockstep", []string(nil)
	if strings.Contains(endpoint, "@") {
		return "", fmt.Errorf("etcd at %s: an address has no user and no password: set ETCDCTL_USER and ETCDCTL_PASSWORD",
			redact.URL(endpoint))
	}
	for part := range strings.SplitSeq(endpoint, ",") {
		if !strings.Contains(part, "://") {
			part = "http://" + part
		}
		u, err := url.Parse(part)
		if err != nil || u.Hostname() == "" || u.Port() == "" || u.Scheme != "http" && u.Scheme != "https" {
			return "", fmt.Errorf("etcd at %q: want host:port, or several with commas between, or https://host:port", endpoint)
		}
		if u.Scheme == "https" {
			scheme = "etcds"
		}
		if p := strings.Trim(u.Path, "/"); p != "" {
			prefix = p
		}
		hosts = append(hosts, u.Host)
	}
	return scheme + "://" + strings.Join(hosts, ",") + "/" + prefix, nil
}

// serve serves a TCP store. Its lifetime does not depend on ctx: it must outlive all its users.
func (m StoreConfig) serve(ctx context.Context) (*JobStore, error) {
	cfg := rendezvous.ServerConfig{Listen: m.Endpoint, Logger: m.Logger, Clients: m.Clients}
	if m.Secret.Given() {
		var err error
		if cfg.TLS, err = m.Secret.TLS(m.ID, 0); err != nil {
			return nil, err
		}
		cfg.Authenticate = m.Secret.Authenticate(secret.Store, m.ID, 0)
	}
	if m.Endpoint != "" {
		address, err := listenAddress(ctx, m.Endpoint)
		if err != nil {
			return nil, err
		}
		cfg.Listen = address
	}
	server, err := rendezvous.Serve(context.Background(), cfg)
	if err != nil {
		return nil, fmt.Errorf("node 0 serves the store at its own address %s: %w", m.Endpoint, err)
	}
	_, port, _ := net.SplitHostPort(server.Addr())
	host, _, _ := net.SplitHostPort(server.Addr())
	if m.Endpoint != "" {
		host, _, _ = net.SplitHostPort(m.Endpoint) // the name by which the others know it
	}
	return &JobStore{Store: server.Store(), URL: "tcp://" + net.JoinHostPort(host, port), server: server}, nil
}

// listenAddress returns the address to listen on for an endpoint of this host: that of the interface by which
// others reach it.
func listenAddress(ctx context.Context, endpoint string) (string, error) {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil {
		return "", err
	}
	there, err := net.DefaultResolver.LookupIP(ctx, "ip", host)
	if err != nil {
		return "", err
	}
	here, err := net.InterfaceAddrs()
	if err != nil {
		return "", err
	}
	if !slices.ContainsFunc(there, func(ip net.IP) bool {
		return ip.IsLoopback() || slices.ContainsFunc(here,
			func(a net.Addr) bool { n, ok := a.(*net.IPNet); return ok && n.IP.Equal(ip) })
	}) {
		return "", fmt.Errorf("node 0 serves the store, so the endpoint must be an address of its host: %s (%v) is not an "+
			"address of this host", host, there)
	}
	address, err := rendezvous.RouteTo(ctx, endpoint)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(address.String(), port), nil
}
