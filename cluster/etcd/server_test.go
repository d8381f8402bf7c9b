package etcd

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// server implements the part of etcd's API that the store uses, in memory. Its faults are scripted. Module tools/etcd
// runs the same conformance suite on a real etcd.
type server struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedAuthServer
	address string
	auth    bool // whether calls need a token

	mu        sync.Mutex
	now       int64
	compacted int64
	keys      map[string]*mvccpb.KeyValue
	events    []*mvccpb.Event
	changed   chan struct{} // closed by the next change
	token     string        // the valid one
	logins    int
	faults    []error // of the next calls; errCut: no answer
	conns     map[net.Conn]bool
	down      bool         // connections are refused
	watches   atomic.Int64 // begun
}

// errCut closes all connections.
var errCut = errors.New("cut")

// newServer serves until the test ends.
func newServer(t *testing.T, opts ...grpc.ServerOption) *server {
	t.Helper()
	s := &server{now: 1, keys: map[string]*mvccpb.KeyValue{}, changed: make(chan struct{}), conns: map[net.Conn]bool{}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.address = l.Addr().String()
	g := grpc.NewServer(append(opts, grpc.UnaryInterceptor(s.intercept), grpc.MaxRecvMsgSize(3<<19))...)
	etcdserverpb.RegisterKVServer(g, s)
	etcdserverpb.RegisterAuthServer(g, s)
	etcdserverpb.RegisterWatchServer(g, watchServer{server: s})
	served := make(chan error)
	go func() { served <- g.Serve(listener{l, s}) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
	return s
}

// listener records its connections.
type listener struct {
	net.Listener
	server *server
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	l.server.conns[c] = true
	if l.server.down {
		c.Close()
	}
	return c, nil
}

// cut closes all connections, and later ones too if the server is down from now on.
func (s *server) cut(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
	for c := range s.conns {
		c.Close()
	}
	clear(s.conns)
}

func (s *server) fail(faults ...error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = faults
}

func (s *server) revision() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// set sets a key to a value in the form of the store.
func (s *server) set(key, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(&etcdserverpb.PutRequest{Key: []byte(key), Value: append([]byte{plainValue}, value...)})
}

func (s *server) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	if info.FullMethod == etcdserverpb.Auth_Authenticate_FullMethodName {
		return h(ctx, req)
	}
	md, _ := metadata.FromIncomingContext(ctx)
	s.mu.Lock()
	var fault error
	switch token := md.Get(rpctypes.TokenFieldNameGRPC); {
	case s.auth && len(token) == 0:
		fault = rpctypes.ErrGRPCUserEmpty
	case s.auth && token[0] != s.token:
		fault = rpctypes.ErrGRPCInvalidAuthToken
	case len(s.faults) > 0:
		fault, s.faults = s.faults[0], s.faults[1:]
	}
	s.mu.Unlock()
	if errors.Is(fault, errCut) {
		s.cut(false)
	}
	if fault != nil {
		return nil, fault
	}
	return h(ctx, req)
}

func (s *server) Authenticate(
	_ context.Context, r *etcdserverpb.AuthenticateRequest,
) (*etcdserverpb.AuthenticateResponse, error) {
	if r.Name != "me" || r.Password != "pw" {
		return nil, rpctypes.ErrGRPCAuthFailed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logins++
	s.token = string(rune('A' + s.logins))
	return &etcdserverpb.AuthenticateResponse{Token: s.token}, nil
}

// in reports whether a key lies in a range.
func in(key, from, to []byte) bool {
	if len(to) == 0 {
		return bytes.Equal(key, from)
	}
	return bytes.Compare(key, from) >= 0 && (bytes.Equal(to, []byte{0}) || bytes.Compare(key, to) < 0)
}

func (s *server) find(from, to []byte) (found []*mvccpb.KeyValue) {
	for _, kv := range s.keys {
		if in(kv.Key, from, to) {
			found = append(found, kv)
		}
	}
	return found
}

func (s *server) header() *etcdserverpb.ResponseHeader {
	return &etcdserverpb.ResponseHeader{Revision: s.now}
}

func (s *server) rangeOf(r *etcdserverpb.RangeRequest) *etcdserverpb.RangeResponse {
	kvs := s.find(r.Key, r.RangeEnd)
	slices.SortFunc(kvs, func(a, b *mvccpb.KeyValue) int {
		if r.SortTarget == etcdserverpb.RangeRequest_MOD {
			return cmp.Compare(a.ModRevision, b.ModRevision)
		}
		return bytes.Compare(a.Key, b.Key)
	})
	return &etcdserverpb.RangeResponse{Header: s.header(), Kvs: kvs, Count: int64(len(kvs))}
}

func (s *server) change(kind mvccpb.Event_EventType, kv *mvccpb.KeyValue) {
	s.events = append(s.events, &mvccpb.Event{Type: kind, Kv: kv})
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *server) put(r *etcdserverpb.PutRequest) *etcdserverpb.PutResponse {
	before := s.keys[string(r.Key)]
	s.now++
	kv := &mvccpb.KeyValue{Key: r.Key, Value: r.Value, CreateRevision: s.now, ModRevision: s.now}
	if before != nil {
		kv.CreateRevision = before.CreateRevision
	}
	s.keys[string(r.Key)] = kv
	s.change(mvccpb.Event_PUT, kv)
	return &etcdserverpb.PutResponse{Header: s.header(), PrevKv: before}
}

func (s *server) Range(_ context.Context, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rangeOf(r), nil
}

func (s *server) Put(_ context.Context, r *etcdserverpb.PutRequest) (*etcdserverpb.PutResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.put(r), nil
}

func (s *server) DeleteRange(
	_ context.Context, r *etcdserverpb.DeleteRangeRequest,
) (*etcdserverpb.DeleteRangeResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.remove(r), nil
}

func (s *server) remove(r *etcdserverpb.DeleteRangeRequest) *etcdserverpb.DeleteRangeResponse {
	gone := s.find(r.Key, r.RangeEnd)
	if len(gone) > 0 {
		s.now++
	}
	for _, kv := range gone {
		delete(s.keys, string(kv.Key))
		s.change(mvccpb.Event_DELETE, &mvccpb.KeyValue{Key: kv.Key, ModRevision: s.now})
	}
	return &etcdserverpb.DeleteRangeResponse{Header: s.header(), PrevKvs: gone}
}

func (s *server) Txn(_ context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := &etcdserverpb.TxnResponse{Succeeded: true}
	for _, c := range r.Compare {
		var created, modified int64
		var value []byte
		if kv := s.keys[string(c.Key)]; kv != nil {
			created, modified, value = kv.CreateRevision, kv.ModRevision, kv.Value
		}
		switch c.Target {
		case etcdserverpb.Compare_CREATE:
			answer.Succeeded = answer.Succeeded && created == c.GetCreateRevision()
		case etcdserverpb.Compare_VALUE:
			answer.Succeeded = answer.Succeeded && value != nil && bytes.Equal(value, c.GetValue())
		default:
			answer.Succeeded = answer.Succeeded && modified == c.GetModRevision()
		}
	}
	ops := r.Failure
	if answer.Succeeded {
		ops = r.Success
	}
	for _, op := range ops {
		if p := op.GetRequestPut(); p != nil {
			answer.Responses = append(answer.Responses, &etcdserverpb.ResponseOp{
				Response: &etcdserverpb.ResponseOp_ResponsePut{ResponsePut: s.put(p)},
			})
			continue
		}
		if d := op.GetRequestDeleteRange(); d != nil {
			answer.Responses = append(answer.Responses, &etcdserverpb.ResponseOp{
				Response: &etcdserverpb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: s.remove(d)},
			})
			continue
		}
		answer.Responses = append(answer.Responses, &etcdserverpb.ResponseOp{
			Response: &etcdserverpb.ResponseOp_ResponseRange{ResponseRange: s.rangeOf(op.GetRequestRange())},
		})
	}
	answer.Header = s.header()
	return answer, nil
}

// watchServer serves the watches of a server.
type watchServer struct {
	etcdserverpb.UnimplementedWatchServer
	server *server
}

func (w watchServer) Watch(stream etcdserverpb.Watch_WatchServer) error {
	ctx, cancel := context.WithCancel(stream.Context())
	var sending sync.Mutex
	send := func(r *etcdserverpb.WatchResponse) bool {
		sending.Lock()
		defer sending.Unlock()
		return stream.Send(r) == nil
	}
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	ends := map[int64]context.CancelFunc{}
	for {
		r, err := stream.Recv()
		if err != nil {
			return nil // the client has gone
		}
		if c := r.GetCancelRequest(); c != nil {
			ends[c.WatchId]()
			send(&etcdserverpb.WatchResponse{Header: w.header(), WatchId: c.WatchId, Canceled: true})
			continue
		}
		if c := r.GetCreateRequest(); c != nil {
			id := w.server.watches.Add(1)
			one, end := context.WithCancel(ctx)
			ends[id] = end
			send(&etcdserverpb.WatchResponse{Header: w.header(), WatchId: id, Created: true})
			work.Go(func() { w.follow(one, id, c, send) })
		}
	}
}

func (w watchServer) header() *etcdserverpb.ResponseHeader {
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	return w.server.header()
}

// follow sends the events of one watch.
func (w watchServer) follow(
	ctx context.Context, id int64, c *etcdserverpb.WatchCreateRequest, send func(*etcdserverpb.WatchResponse) bool,
) {
	for at := c.StartRevision; ; {
		r := &etcdserverpb.WatchResponse{WatchId: id}
		s := w.server
		s.mu.Lock()
		r.Header = s.header()
		if at <= s.compacted {
			r.CompactRevision, r.Canceled = s.compacted, true
		}
		for _, e := range s.events {
			if e.Kv.ModRevision >= at && in(e.Kv.Key, c.Key, c.RangeEnd) {
				r.Events = append(r.Events, e)
			}
		}
		changed := s.changed
		at = s.now + 1
		s.mu.Unlock()
		if ctx.Err() != nil || (len(r.Events) > 0 || r.Canceled) && !send(r) || r.Canceled {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// noLeader is etcd's answer during an election.
var noLeader = status.Convert(rpctypes.ErrGRPCNoLeader).Err()
