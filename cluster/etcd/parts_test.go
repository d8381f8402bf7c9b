package etcd

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestMissingParts: a value whose parts another program has deleted is an error that names the key, at once. The key
// can be deleted and set again.
func TestMissingParts(t *testing.T) {
	s := newServer(t)
	r := openAt(t, s, Config{}, time.Minute)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	large := make([]byte, partBytes+1)
	if err := r.Set(ctx, "job/large", large); err != nil {
		t.Fatal(err)
	}
	if v, _, err := r.Get(ctx, "job/large"); err != nil || len(v) != len(large) {
		t.Fatalf("%d bytes, %v", len(v), err)
	}
	s.mu.Lock()
	s.remove(&etcdserverpb.DeleteRangeRequest{Key: []byte("p/@parts/"), RangeEnd: []byte("p/@parts0")})
	s.mu.Unlock()
	for name, read := range map[string]func() error{
		"Get":     func() error { _, _, err := r.Get(ctx, "job/large"); return err },
		"List":    func() error { _, _, err := r.List(ctx, "job/"); return err },
		"Changes": func() error { _, _, err := r.Changes(ctx, "job/", 0); return err },
		"Create":  func() error { _, _, err := r.Create(ctx, "job/large", nil); return err },
	} {
		begin := time.Now()
		err := read()
		if err == nil || !strings.Contains(err.Error(), `key "p/job/large" is incomplete`) {
			t.Errorf("%s after %v: %v, want an error that names the key", name, time.Since(begin), err)
		}
	}
	if err := r.Delete(ctx, "job/large"); err != nil {
		t.Error(err)
	}
	if err := r.Set(ctx, "job/large", large); err != nil {
		t.Error(err)
	}
	if entries, _, err := r.List(ctx, "job/"); err != nil || len(entries) != 1 || len(entries[0].Value) != len(large) {
		t.Errorf("%d entries, %v", len(entries), err)
	}
	if _, _, err := r.Get(ctx, "job/none"); !errors.Is(err, rendezvous.ErrNotFound) {
		t.Error(err)
	}
}
