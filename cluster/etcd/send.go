package etcd

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc/stats"
)

// sendTracker records which calls were sent: a change that was certainly not sent may be repeated. gRPC reports a
// call's header when it is written to a connection.
type sendTracker struct{}

type sentKey struct{}

// trackSend returns a context for calls, and whether one of them was sent.
func trackSend(ctx context.Context) (context.Context, *atomic.Bool) {
	sent := new(atomic.Bool)
	return context.WithValue(ctx, sentKey{}, sent), sent
}

// TagRPC implements [stats.Handler].
func (sendTracker) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements [stats.Handler].
func (sendTracker) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if _, header := s.(*stats.OutHeader); !header {
		return
	}
	if sent, ok := ctx.Value(sentKey{}).(*atomic.Bool); ok {
		sent.Store(true)
	}
}

// TagConn implements [stats.Handler].
func (sendTracker) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements [stats.Handler].
func (sendTracker) HandleConn(context.Context, stats.ConnStats) {}
