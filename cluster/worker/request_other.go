//go:build !unix

package worker

import "os"

// requests: this system has no signal to ask by.
func requests() (asked <-chan os.Signal, stop func()) { return nil, func() {} }
