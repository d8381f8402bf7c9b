//go:build !unix

package worker

import "os"

// requests does nothing: this system has no signal for it.
func requests() (asked <-chan os.Signal, stop func()) { return nil, func() {} }
