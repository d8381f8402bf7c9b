//go:build !linux

package listener

import "syscall"

// untilDataComes is what other systems do not have.
func untilDataComes(_, _ string, _ syscall.RawConn) error { return nil }
