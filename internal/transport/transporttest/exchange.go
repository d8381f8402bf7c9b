package transporttest

import (
	"context"
	"sync"
)

// Exchanges returns functions for package transport/mixed that connect n callers of its Open in one process, as if they
// were n processes.
func Exchanges(n int) []func(ctx context.Context, mine []byte) (all [][]byte, err error) {
	registrations := make([][]byte, n)
	var mu sync.Mutex
	left := n
	joined := make(chan struct{})
	out := make([]func(context.Context, []byte) ([][]byte, error), n)
	for i := range out {
		out[i] = func(ctx context.Context, mine []byte) ([][]byte, error) {
			mu.Lock()
			registrations[i] = mine
			if left--; left == 0 {
				close(joined)
			}
			mu.Unlock()
			select {
			case <-joined:
				return registrations, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
	}
	return out
}
