package etcd

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// Get implements [rendezvous.Store].
func (s *store) Get(ctx context.Context, key string) (value []byte, revision uint64, err error) {
	err = s.call(ctx, rendezvous.CheckPrefix(key), func(ctx context.Context) error {
		for torn := (tears{}); ; {
			r, err := s.get(ctx, s.prefix+key)
			if err != nil {
				return err
			}
			if len(r.Kvs) == 0 {
				return rendezvous.ErrNotFound
			}
			v, whole, err := s.load(ctx, r.Kvs[0].Value)
			if whole || err != nil {
				value, revision = v, uint64(r.Kvs[0].ModRevision)
				return err
			}
			if err := torn.again(ctx, r.Kvs[0]); err != nil {
				return err
			}
		}
	})
	return value, revision, err
}

// get reads a key or a range.
func (s *store) get(ctx context.Context, key string, opts ...clientv3.OpOption) (r *clientv3.GetResponse, err error) {
	err = s.repeat(ctx, func(ctx context.Context) error {
		r, err = s.client.Get(ctx, key, opts...)
		return err
	})
	return r, err
}

// Set implements [rendezvous.Store].
func (s *store) Set(ctx context.Context, key string, value []byte) error {
	return s.call(ctx, checkPair(key, value), func(ctx context.Context) error {
		_, _, err := s.put(ctx, key, value)
		return err
	})
}

// put sets a key if all conditions hold, and the token of ctx. If not, it returns the key's value.
func (s *store) put(
	ctx context.Context, key string, value []byte, conditions ...clientv3.Cmp,
) (is *mvccpb.KeyValue, done bool, err error) {
	stored, parts, err := s.save(ctx, value)
	if err != nil {
		return nil, false, err
	}
	k := s.prefix + key
	put := clientv3.OpPut(k, string(stored), clientv3.WithPrevKV())
	t, reads := s.tokenOf(ctx), []clientv3.Op{clientv3.OpGet(k)}
	if t != nil {
		conditions, reads = append(conditions, t.holds()), append(reads, clientv3.OpGet(t.key))
	}
	var r *clientv3.TxnResponse
	err = s.write(ctx, func(ctx context.Context) error {
		var err error
		r, err = s.client.Txn(ctx).If(conditions...).Then(put).Else(reads...).Commit()
		return err
	})
	switch {
	case err != nil:
		return nil, false, err // the parts, if any, may be needed: the result is unknown
	case !r.Succeeded:
		if got := r.Responses[0].GetResponseRange(); len(got.Kvs) > 0 {
			is = got.Kvs[0]
		}
		if t != nil && !t.is(r.Responses[1].GetResponseRange()) {
			err = rendezvous.ErrFenced
		}
		return is, false, errors.Join(s.drop(ctx, parts), err)
	}
	if before := r.Responses[0].GetResponsePut().PrevKv; before != nil {
		return nil, true, s.dropOf(ctx, before.Value)
	}
	return nil, true, nil
}

// Create implements [rendezvous.Store].
func (s *store) Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error) {
	err = s.call(ctx, checkPair(key, value), func(ctx context.Context) error {
		for torn := (tears{}); ; {
			is, done, err := s.put(ctx, key, value, clientv3.Compare(clientv3.CreateRevision(s.prefix+key), "=", 0))
			if created = done; done || err != nil {
				return err
			}
			if is == nil {
				continue // deleted meanwhile
			}
			v, whole, err := s.load(ctx, is.Value)
			if whole || err != nil {
				current = v
				return err
			}
			if err := torn.again(ctx, is); err != nil {
				return err
			}
		}
	})
	return current, created, err
}

// Swap implements [rendezvous.Store].
func (s *store) Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error) {
	err = s.call(ctx, checkPair(key, value), func(ctx context.Context) error {
		if revision == 0 { // etcd's revision of a key that does not exist
			return nil
		}
		var err error
		_, swapped, err = s.put(ctx, key, value, clientv3.Compare(clientv3.ModRevision(s.prefix+key), "=", int64(revision)))
		return err
	})
	return swapped, err
}

// Delete implements [rendezvous.Store].
func (s *store) Delete(ctx context.Context, key string) error {
	return s.call(ctx, rendezvous.CheckKey(key), func(ctx context.Context) error {
		var conditions []clientv3.Cmp
		if t := s.tokenOf(ctx); t != nil {
			conditions = append(conditions, t.holds())
		}
		remove := clientv3.OpDelete(s.prefix+key, clientv3.WithPrevKV())
		var r *clientv3.TxnResponse
		err := s.write(ctx, func(ctx context.Context) error {
			var err error
			r, err = s.client.Txn(ctx).If(conditions...).Then(remove).Commit()
			return err
		})
		switch {
		case err != nil:
			return err
		case !r.Succeeded:
			return rendezvous.ErrFenced
		}
		before := r.Responses[0].GetResponseDeleteRange().PrevKvs
		if len(before) == 0 {
			return nil
		}
		return s.dropOf(ctx, before[0].Value)
	})
}

// List implements [rendezvous.Store].
func (s *store) List(ctx context.Context, prefix string) (entries []rendezvous.Entry, revision uint64, err error) {
	err = s.call(ctx, rendezvous.CheckPrefix(prefix), func(ctx context.Context) error {
		var err error
		entries, revision, err = s.list(ctx, prefix, clientv3.SortByKey)
		return err
	})
	return entries, revision, err
}

// list returns the entries at one revision, in the given order. It starts again if a value in parts is replaced
// meanwhile.
func (s *store) list(ctx context.Context, prefix string, by clientv3.SortTarget) ([]rendezvous.Entry, uint64, error) {
	torn := tears{}
again:
	r, err := s.get(ctx, s.prefix+prefix, clientv3.WithPrefix(), clientv3.WithSort(by, clientv3.SortAscend))
	if err != nil {
		return nil, 0, err
	}
	var entries []rendezvous.Entry
	for _, kv := range r.Kvs {
		if s.isPart(kv) {
			continue
		}
		e, whole, err := s.entry(ctx, kv)
		if err != nil {
			return nil, 0, err
		}
		if !whole {
			if err := torn.again(ctx, kv); err != nil {
				return nil, 0, err
			}
			goto again
		}
		entries = append(entries, e)
	}
	return entries, uint64(r.Header.Revision), nil
}

// entry reads an entry. It reports false if its value has been replaced meanwhile.
func (s *store) entry(ctx context.Context, kv *mvccpb.KeyValue) (rendezvous.Entry, bool, error) {
	value, whole, err := s.load(ctx, kv.Value)
	e := rendezvous.Entry{Key: string(kv.Key[len(s.prefix):]), Value: value, Revision: uint64(kv.ModRevision)}
	return e, whole, err
}

// token is the fencing token of a write, as etcd has it.
type token struct{ key, stored string }

// tokenOf returns the token of a write with ctx, or nil. A token is short: its stored form is in one part.
func (s *store) tokenOf(ctx context.Context) *token {
	t, ok := rendezvous.TokenOf(ctx)
	if !ok {
		return nil
	}
	return &token{s.prefix + t.Key, string(append([]byte{plainValue}, t.Value...))}
}

// holds is the condition that the token is the current one.
func (t *token) holds() clientv3.Cmp { return clientv3.Compare(clientv3.Value(t.key), "=", t.stored) }

// is reports whether the token is the one that was read.
func (t *token) is(r *etcdserverpb.RangeResponse) bool {
	return len(r.Kvs) > 0 && string(r.Kvs[0].Value) == t.stored
}
