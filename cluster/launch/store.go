package launch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// Meeting says where the agents and the workers of a job meet.
type Meeting struct {
	// Backend is the kind of store: "tcp", "file", or a scheme of Schemes.
	Backend string
	// Endpoint is where it is: "host:port" (tcp), a folder that all nodes share (file), what else the scheme wants after "://".
	// With Serve and tcp it is the address to listen on; "" is any free port of 127.0.0.1.
	Endpoint string
	// ID names the job, and Secret, if given, encrypts the connections to a TCP store and proves who their ends are.
	ID     string
	Secret secret.Secret
	// Serve says that a TCP store is to be served here.
	Serve bool
	// Schemes are further kinds of stores.
	Schemes map[string]rendezvous.Opener
	// Logger gets what the store has to say. Default slog.Default().
	Logger *slog.Logger
}

// Place is an open store, and how it is reached.
type Place struct {
	Store rendezvous.Store
	// URL is what the workers are told.
	URL string

	server *rendezvous.Server
}

// Close ends the use of the store, and the store itself if it is served here.
func (p *Place) Close() error {
	err := p.Store.Close()
	if p.server != nil {
		err = errors.Join(err, p.server.Close())
	}
	return err
}

// Open opens the store, or serves it. One that is served elsewhere is waited for until ctx ends.
func (m Meeting) Open(ctx context.Context) (*Place, error) {
	if m.Backend == "tcp" && m.Serve {
		return m.serve()
	}
	cfg := rendezvous.Config{Schemes: m.Schemes, Logger: m.Logger}
	url, err := m.url()
	if err == nil && m.Secret.Given() {
		cfg.TLS, err = m.Secret.TLS(m.ID, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	store, err := rendezvous.Open(ctx, url, cfg)
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	return &Place{Store: store, URL: url}, nil
}

func (m Meeting) url() (string, error) {
	if m.Backend != "file" {
		return m.Backend + "://" + m.Endpoint, nil
	}
	path, err := filepath.Abs(strings.TrimPrefix(m.Endpoint, "file://"))
	return "file://" + filepath.ToSlash(path), err
}

// serve serves a TCP store. Its life has nothing to do with a context: it must outlive all who use it.
func (m Meeting) serve() (*Place, error) {
	cfg := rendezvous.ServerConfig{Listen: m.Endpoint, Logger: m.Logger}
	if m.Secret.Given() {
		var err error
		if cfg.TLS, err = m.Secret.TLS(m.ID, 0); err != nil {
			return nil, fmt.Errorf("launch: %w", err)
		}
	}
	if m.Endpoint != "" {
		address, err := listenAddress(m.Endpoint)
		if err != nil {
			return nil, fmt.Errorf("launch: %w", err)
		}
		cfg.Listen = address
	}
	server, err := rendezvous.Serve(context.Background(), cfg)
	if err != nil {
		return nil, fmt.Errorf("launch: node 0 serves the store at its own address %s: %w", m.Endpoint, err)
	}
	_, port, _ := net.SplitHostPort(server.Addr())
	host, _, _ := net.SplitHostPort(server.Addr())
	if m.Endpoint != "" {
		host, _, _ = net.SplitHostPort(m.Endpoint) // as the others know it
	}
	return &Place{Store: server.Store(), URL: "tcp://" + net.JoinHostPort(host, port), server: server}, nil
}

// listenAddress is the one address to listen on for an endpoint of this host: that of the interface by which others reach it.
func listenAddress(endpoint string) (string, error) {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil {
		return "", err
	}
	there, err := net.LookupIP(host)
	if err != nil {
		return "", err
	}
	here, err := net.InterfaceAddrs()
	if err != nil {
		return "", err
	}
	if !slices.ContainsFunc(there, func(ip net.IP) bool {
		return ip.IsLoopback() || slices.ContainsFunc(here, func(a net.Addr) bool { n, ok := a.(*net.IPNet); return ok && n.IP.Equal(ip) })
	}) {
		return "", fmt.Errorf("node 0 serves the store, so the endpoint must be an address of its host: %s (%v) is none of this one", host, there)
	}
	address, err := rendezvous.RouteTo(context.Background(), endpoint)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(address.String(), port), nil
}
