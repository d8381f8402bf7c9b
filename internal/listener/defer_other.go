//go:build !linux

package listener

import "syscall"

// deferAccept does nothing: other systems have no such option.
func deferAccept(_, _ string, _ syscall.RawConn) error { return nil }
