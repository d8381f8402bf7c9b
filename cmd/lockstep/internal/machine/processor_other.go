//go:build !unix

package machine

import "time"

// ProcessorTime returns 0: the system does not report it.
func ProcessorTime() time.Duration { return 0 }
