//go:build !linux

package shm

import (
	"context"

	"github.com/lockstep-ml/lockstep/transport"
)

// Open returns an error: only Linux has the shared memory that this package needs.
func Open(context.Context, Config) ([]transport.Endpoint, error) { return nil, errNoSharedMemory }

// HostID returns a text that is equal in two processes if they can share memory: "" on this system.
func HostID() string { return "" }
