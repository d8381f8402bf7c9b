//go:build !unix

package main

import "time"

// processorTime returns 0: the system does not report it.
func processorTime() time.Duration { return 0 }
