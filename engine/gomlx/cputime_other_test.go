//go:build !unix

package gomlx_test

import "time"

// cpuTime returns 0: only Unix reports the processor time of a process this way.
func cpuTime() time.Duration { return 0 }
