// Package pause waits in a way that a context can end.
package pause

import (
	"context"
	"time"
)

// For waits for d. If ctx ends first, For returns its cause.
func For(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
