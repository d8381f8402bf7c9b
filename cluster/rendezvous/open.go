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
)

// Config says how a store is reached. The zero value works, without encryption and proof of who one is.
type Config struct {
	// TLS encrypts the connections to a TCP store, and proves who the two ends are if it says so. It may be the server's own: set
	// Certificates, RootCAs and ClientCAs, and ClientAuth to tls.RequireAndVerifyClientCert; without ServerName the host dialed is
	// verified. Default nil: plain.
	TLS *tls.Config
	// Authenticate, if given, lets the two ends of a new connection prove to each other that they belong together, after the
	// greeting, which is given to it: it may read and write exactly what it needs on conn, which has a deadline. An error ends
	// the connection, and the attempt to reach the store.
	Authenticate func(conn net.Conn, dialed bool, greeting []byte) error
	// Dial makes connections. Default: a [net.Dialer]'s.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Patience bounds how long calls wait for a TCP store that was reached once and is gone; then they return [ErrLost].
	// Default 15 seconds. Open itself waits until its ctx ends.
	Patience time.Duration
	// Etcd says how etcd is spoken to. Default nil: as [EtcdFromEnvironment] says of this process's environment.
	Etcd *EtcdConfig
	// Schemes are further kinds of stores, by the scheme of their URL, or other ways to those that there are: module cluster/etcd's.
	Schemes map[string]Opener
	// Logger gets what is worth knowing, such as that the store was lost and is back. Default slog.Default().
	Logger *slog.Logger
}

// Opener opens a store of one kind. The URL is as it was given to [Open], scheme and all.
type Opener func(ctx context.Context, url string, cfg Config) (Store, error)

// Open opens the store at a URL: "tcp://host:port", "file:///folder", "etcd://host:port,host:port/prefix", "etcds://…", or one of Config.Schemes. It waits until ctx ends for
// a store that does not answer yet, as the one who serves it may start last. A store that refuses this process is an error at once.
func Open(ctx context.Context, url string, cfg Config) (Store, error) {
	cfg = cfg.filled()
	scheme, _, found := strings.Cut(url, "://")
	open := cfg.Schemes[scheme]
	if !found || open == nil {
		return nil, fmt.Errorf("rendezvous: store %q: this program knows stores whose URLs begin with %s://; others "+
			"are given in Config.Schemes", url, strings.Join(slices.Sorted(maps.Keys(cfg.Schemes)), ":// or "))
	}
	report := reportWait(ctx, Waiting{Store: url})
	defer report.stop()
	s, err := open(ctx, url, cfg)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: opening the store %s: %w", url, err)
	}
	return s, nil
}

// filled returns c with its defaults.
func (c Config) filled() Config {
	schemes := map[string]Opener{"tcp": openTCP, "file": openFile, "etcd": openEtcd, "etcds": openEtcd}
	maps.Copy(schemes, c.Schemes)
	c.Schemes = schemes
	if c.Patience <= 0 {
		c.Patience = 15 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Dial == nil {
		c.Dial = (&net.Dialer{}).DialContext
	}
	return c
}
