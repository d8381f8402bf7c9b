//go:build !linux

package tcp

import (
	"net"
	"time"
)

// socket is not used: a pump moves the bytes of all connections.
type socket struct{}

// newSocket returns nil: this system has no non-blocking access to sockets.
func newSocket(net.Conn, *poller) wire { return nil }

func (*socket) Control(func(fd uintptr)) error { return net.ErrClosed }

type poller struct{ notify func() }

func (*poller) close() {}

type sockets struct{}

func (*sockets) add(wire, bool, bool) bool { return false }

func (*sockets) wait(time.Duration) bool { return false }

func (*sockets) done() {}
