package rendezvous

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/internal/redact"
)

// Config configures the access to a store. The zero value works, without encryption and authentication.
type Config struct {
	// TLS encrypts the connections to a TCP store, and authenticates both ends if so configured. It may be
	// the same configuration as the server's: set Certificates, RootCAs and ClientCAs, and ClientAuth to
	// tls.RequireAndVerifyClientCert. Without ServerName the dialed host is verified. Default nil: plain TCP.
	TLS *tls.Config
	// Authenticate, if not nil, lets the two ends of a new connection authenticate each other. It is called
	// after the hello, with the hello as an argument. It may read and write exactly what it needs on
	// conn, which has a deadline. An error closes the connection, and fails the attempt to reach the store.
	Authenticate func(conn net.Conn, dialed bool, hello []byte) error
	// Dial makes connections. Default: a [net.Dialer]'s.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// ReconnectTimeout bounds how long calls wait for a TCP store that was reached once and is gone; then they return
	// [ErrLost]. Default 15 seconds. Open itself waits until its ctx ends.
	ReconnectTimeout time.Duration
	// Schemes adds kinds of stores by URL scheme, or replaces built-in ones. Package cluster/etcd adds etcd.
	Schemes map[string]Opener
	// Logger receives messages such as the loss and the return of the store. Default slog.Default().
	Logger *slog.Logger
}

// Opener opens a store of one kind. It gets the URL that was passed to [Open], including the scheme.
type Opener func(ctx context.Context, url string, cfg Config) (Store, error)

// Open opens the store at a URL: "tcp://host:port", "file:///folder", or one of Config.Schemes. It waits until ctx ends
// for a store that does not answer yet, since the process that serves it may start last. A store that refuses this
// process is an error at once.
func Open(ctx context.Context, url string, cfg Config) (Store, error) {
	cfg = cfg.filled()
	scheme, _, found := strings.Cut(url, "://")
	open := cfg.Schemes[scheme]
	if !found || open == nil {
		return nil, fmt.Errorf("rendezvous: store %q: this program knows stores whose URLs begin with %s://; others "+
			"are given in Config.Schemes, such as etcd.Schemes() of package cluster/etcd",
			redact.URL(url), strings.Join(slices.Sorted(maps.Keys(cfg.Schemes)), ":// or "))
	}
	report := reportWait(ctx, Waiting{Store: redact.URL(url)}, nil)
	defer report.stop()
	s, err := open(ctx, url, cfg)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: opening the store %s: %w", redact.URL(url), err)
	}
	return s, nil
}

// filled returns c with its defaults.
func (c Config) filled() Config {
	schemes := map[string]Opener{"tcp": openTCP, "file": openFile}
	maps.Copy(schemes, c.Schemes)
	c.Schemes = schemes
	if c.ReconnectTimeout <= 0 {
		c.ReconnectTimeout = 15 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Dial == nil {
		c.Dial = (&net.Dialer{}).DialContext
	}
	return c
}
