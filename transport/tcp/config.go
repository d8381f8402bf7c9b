package tcp

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// Config configures a [Node]. The zero value listens on loopback. Job, and whether TLS or Authenticate is set, must be
// the same in all processes.
type Config struct {
	// Listen is the address, and the port or the range of ports, to listen on: "10.0.0.5:0", "[::1]:7000-7099". Only
	// that address is bound. Default "127.0.0.1:0": any free port.
	Listen string
	// Listener replaces Listen if it is not nil. The node closes it.
	Listener net.Listener
	// SharedListener replaces Listen, Listener, Handshake, HalfOpen and the Logger of refusals if it is not nil: a port
	// that the process shares with other services. The node does not close it.
	SharedListener *listener.Listener
	// Dial opens connections. Default: a [net.Dialer]'s.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Job names the job: processes of another job are refused. It is not secret.
	Job string
	// TLS encrypts all connections except those with [GroupConfig.SameHost]. The same config is used for both sides:
	// set Certificates, RootCAs and ClientCAs, and ClientAuth to tls.RequireAndVerifyClientCert; without ServerName the
	// dialed host is verified. Package cluster/secret makes one. Default nil: no encryption.
	TLS *tls.Config
	// Authenticate, if not nil, authenticates the two ends of a new connection to each other after the hello, before
	// TLS. It must read and write on conn no more than its own messages; conn has a deadline. An error refuses the
	// connection. Package cluster/secret makes one.
	Authenticate func(conn net.Conn, dialed bool, hello []byte) error
	// Handshake bounds the time of the handshake of a new connection. Default 10 seconds.
	Handshake time.Duration
	// HalfOpen bounds the number of connections whose handshake is incomplete. One more evicts the oldest of the
	// address that has the most. Default 128.
	HalfOpen int
	// KeepAlive detects hosts that vanished: on Linux within Idle plus Count times Interval, also while sent data is
	// unacknowledged. Default: Idle and Interval 5 seconds, Count 2.
	KeepAlive net.KeepAliveConfig
	// Meter measures the connections with other hosts. Default nil: they are not measured.
	Meter *Meter
	// Logger receives the warnings about refused connections. Default slog.Default().
	Logger *slog.Logger
}

// filled returns c with its defaults.
func (c Config) filled() Config {
	if c.Handshake <= 0 {
		c.Handshake = 10 * time.Second
	}
	if c.KeepAlive == (net.KeepAliveConfig{}) {
		c.KeepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 2}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Dial == nil {
		c.Dial = (&net.Dialer{KeepAliveConfig: c.KeepAlive}).DialContext
	}
	if c.TLS != nil {
		c.TLS = c.TLS.Clone()
		c.TLS.DynamicRecordSizingDisabled = true
	}
	return c
}
