//go:build !linux

package tcp

import "time"

type socketInfo struct{}

// newSocketInfo returns nil: this system does not count how long a connection sends.
func newSocketInfo(*socket) *socketInfo { return nil }

func (*socketInfo) read() (sending time.Duration, bytes int64, ok bool) { return 0, 0, false }
