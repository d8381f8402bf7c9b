package tcp

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// Config sets up a [Node]. The zero value works, on loopback. Job, Streams and Checksum, and whether there is TLS or
// Authenticate, must be the same in all processes.
type Config struct {
	// Listen is the address and the port, or the range of ports, to listen on: "10.0.0.5:0", "[::1]:7000-7099". Only that
	// address is bound. Default "127.0.0.1:0": any free port.
	Listen string
	// Listener is used instead of Listen, if given. The node closes it.
	Listener net.Listener
	// SharedListener is used instead of both, if given, with its own Handshake and HalfOpen: a port that the process shares with other services.
	// The node leaves it open.
	SharedListener *listener.Listener
	// Dial makes connections. Default: a [net.Dialer]'s.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Job names the job: processes of another are refused. It is no secret.
	Job string
	// Streams is the number of data connections between two ranks, frames alternate over them: 1 to 64. Default 1. More
	// are faster where one connection has a limit of its own, as between some cloud machines.
	Streams int
	// Checksum adds a CRC-32C of the data to each frame. The heads always have theirs. Default: none, as TCP and TLS have
	// their own, and on loopback it costs a third more time for large frames.
	Checksum bool
	// TLS encrypts all connections, but for those with [GroupConfig.SameHost]. It serves both sides: set Certificates, RootCAs
	// and ClientCAs, and ClientAuth to tls.RequireAndVerifyClientCert; without ServerName the host dialed is verified.
	// Package cluster/secret makes one. Default nil: plain.
	TLS *tls.Config
	// Authenticate, if given, lets the two ends of a new connection prove to each other that they belong together, after
	// the greeting, which is given to it: it may read and write exactly what it needs on conn, which has a deadline, and is
	// a *tls.Conn if there is TLS. An error refuses the connection. Package cluster/secret makes one.
	Authenticate func(conn net.Conn, dialed bool, greeting []byte) error
	// Handshake bounds the time of a new connection until its greeting is read. Default 10 seconds.
	Handshake time.Duration
	// HalfOpen bounds the connections that have not greeted yet, or proven themselves; for one more, the oldest is dropped of
	// the address that has the most. Default 128.
	HalfOpen int
	// KeepAlive finds hosts that vanished: on Linux, within Idle and Count times Interval also where data is on its way. Default: after 5 seconds of silence, every 5, given up after the second.
	KeepAlive net.KeepAliveConfig
	// SocketBuffer sizes the kernel's buffers of a data connection, in bytes. Default 0: the kernel adapts them, which
	// measured as well as any fixed size.
	SocketBuffer int
	// Logger gets the warnings about refused connections. Default slog.Default().
	Logger *slog.Logger
}

// filled returns c with its defaults, or what is wrong with it.
func (c Config) filled() (Config, error) {
	if c.Streams == 0 {
		c.Streams = 1
	}
	if c.Streams < 1 || c.Streams > streamsMax {
		return c, fmt.Errorf("tcp: %d streams, want 1 to %d", c.Streams, streamsMax)
	}
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
	return c, nil
}
