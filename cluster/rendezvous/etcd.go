package rendezvous

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster"
)

// openEtcd opens "etcd://host:port,host:port/prefix", or "etcds://…" for TLS. The keys below the prefix have
// the same format as in module cluster/etcd: both can be used on the same etcd by the same job.
func openEtcd(ctx context.Context, url string, cfg Config) (Store, error) {
	scheme, rest, _ := strings.Cut(url, "://")
	hosts, prefix, _ := strings.Cut(rest, "/")
	var login EtcdConfig
	var err error
	if cfg.Etcd != nil {
		login = *cfg.Etcd
	} else if login, err = etcdFromEnvironment(os.Getenv, cluster.ReadFile); err != nil {
		return nil, err
	}
	g, err := newGateway(map[string]string{"etcd": "http", "etcds": "https"}[scheme], hosts, login, cfg)
	if err != nil {
		return nil, err
	}
	s := &etcdStore{gateway: g, prefix: strings.TrimSuffix(prefix, "/") + "/", watches: watches{keep: watchUnused}}
	s.ctx, s.end = context.WithCancelCause(context.Background())
	for { // until ctx ends
		_, _, err = s.Get(ctx, "?")
		if err == nil || errors.Is(err, ErrNotFound) {
			return s, nil
		}
		if !errors.Is(err, ErrLost) {
			return nil, errors.Join(err, s.Close())
		}
	}
}

// etcdStore is a handle on etcd.
type etcdStore struct {
	gateway *gateway
	prefix  string // of all keys
	ctx     context.Context
	end     context.CancelCauseFunc
	watches watches
}

// The gateway encodes bytes as base64 and 64-bit numbers as strings; encoding/json supports both.
type (
	etcdKV struct {
		Key         []byte `json:"key"`
		Value       []byte `json:"value,omitempty"`
		ModRevision uint64 `json:"mod_revision,string"`
	}
	etcdHeader struct {
		Revision uint64 `json:"revision,string"`
	}
	etcdRange struct {
		Key        []byte `json:"key"`
		End        []byte `json:"range_end,omitempty"`
		SortOrder  string `json:"sort_order,omitempty"`
		SortTarget string `json:"sort_target,omitempty"`
	}
	etcdRangeAnswer struct {
		Header etcdHeader `json:"header"`
		KVs    []etcdKV   `json:"kvs"`
	}
	etcdPut struct {
		Key    []byte `json:"key"`
		Value  []byte `json:"value"`
		PrevKV bool   `json:"prev_kv"`
	}
	etcdDelete struct {
		Key    []byte `json:"key"`
		End    []byte `json:"range_end,omitempty"`
		PrevKV bool   `json:"prev_kv"`
	}
	etcdCompare struct {
		Key            []byte  `json:"key"`
		Target         string  `json:"target"`
		Result         string  `json:"result"`
		CreateRevision *uint64 `json:"create_revision,string,omitempty"`
		ModRevision    *uint64 `json:"mod_revision,string,omitempty"`
	}
	etcdOp struct {
		Put   *etcdPut   `json:"request_put,omitempty"`
		Range *etcdRange `json:"request_range,omitempty"`
	}
	etcdTxn struct {
		Compare []etcdCompare `json:"compare,omitempty"`
		Success []etcdOp      `json:"success"`
		Failure []etcdOp      `json:"failure"`
	}
	etcdTxnAnswer struct {
		Succeeded bool `json:"succeeded"`
		Responses []struct {
			Range etcdRangeAnswer `json:"response_range"`
			Put   struct {
				PrevKV *etcdKV `json:"prev_kv"`
			} `json:"response_put"`
		} `json:"responses"`
	}
)

// call calls do with a context that also ends with Close.
func (s *etcdStore) call(ctx context.Context, wrong error, do func(ctx context.Context) error) error {
	if wrong != nil {
		return wrong
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(ErrClosed) })()
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	err := do(ctx)
	if err != nil && s.ctx.Err() != nil { // a call ended by Close may return before ctx ends
		return ErrClosed
	}
	if err != nil && ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return context.Cause(ctx)
	}
	return err
}

// Close implements [Store].
func (s *etcdStore) Close() error {
	s.end(ErrClosed)
	s.watches.close()
	s.gateway.client.CloseIdleConnections()
	return nil
}

// Get implements [Store].
func (s *etcdStore) Get(ctx context.Context, key string) (value []byte, revision uint64, err error) {
	err = s.call(ctx, CheckPrefix(key), func(ctx context.Context) error {
		for {
			var r etcdRangeAnswer
			if err := s.gateway.call(ctx, "kv/range", true, etcdRange{Key: []byte(s.prefix + key)}, &r); err != nil {
				return err
			}
			if len(r.KVs) == 0 {
				return ErrNotFound
			}
			v, whole, err := s.load(ctx, r.KVs[0].Value)
			if whole || err != nil {
				value, revision = v, r.KVs[0].ModRevision
				return err
			}
		}
	})
	return value, revision, err
}

// Set implements [Store].
func (s *etcdStore) Set(ctx context.Context, key string, value []byte) error {
	return s.call(ctx, checkPair(key, value), func(ctx context.Context) error {
		_, _, err := s.put(ctx, key, value)
		return err
	})
}

// put sets a key if all conditions hold. If not, it returns the key's value.
func (s *etcdStore) put(
	ctx context.Context, key string, value []byte, conditions ...etcdCompare,
) (is *etcdKV, done bool, err error) {
	stored, parts, err := s.save(ctx, value)
	if err != nil {
		return nil, false, err
	}
	k := []byte(s.prefix + key)
	txn := etcdTxn{conditions, []etcdOp{{Put: &etcdPut{k, stored, true}}}, []etcdOp{{Range: &etcdRange{Key: k}}}}
	var r etcdTxnAnswer
	if err := s.gateway.call(ctx, "kv/txn", false, txn, &r); err != nil {
		return nil, false, err // the parts, if any, may be needed: the result is unknown
	}
	if len(r.Responses) != 1 {
		return nil, false, fmt.Errorf("etcd: a transaction of one operation has %d answers", len(r.Responses))
	}
	if !r.Succeeded {
		if got := r.Responses[0].Range.KVs; len(got) > 0 {
			is = &got[0]
		}
		return is, false, s.drop(ctx, parts)
	}
	if before := r.Responses[0].Put.PrevKV; before != nil {
		return nil, true, s.dropOf(ctx, before.Value)
	}
	return nil, true, nil
}

// Create implements [Store].
func (s *etcdStore) Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error) {
	absent := etcdCompare{Key: []byte(s.prefix + key), Target: "CREATE", Result: "EQUAL", CreateRevision: new(uint64)}
	err = s.call(ctx, checkPair(key, value), func(ctx context.Context) error {
		for {
			is, done, err := s.put(ctx, key, value, absent)
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
		}
	})
	return current, created, err
}

// Swap implements [Store].
func (s *etcdStore) Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error) {
	same := etcdCompare{Key: []byte(s.prefix + key), Target: "MOD", Result: "EQUAL", ModRevision: &revision}
	err = s.call(ctx, checkPair(key, value), func(ctx context.Context) error {
		if revision == 0 { // etcd's revision of a key that does not exist
			return nil
		}
		var err error
		_, swapped, err = s.put(ctx, key, value, same)
		return err
	})
	return swapped, err
}

// Delete implements [Store].
func (s *etcdStore) Delete(ctx context.Context, key string) error {
	return s.call(ctx, CheckKey(key), func(ctx context.Context) error {
		var r struct {
			PrevKVs []etcdKV `json:"prev_kvs"`
		}
		err := s.gateway.call(ctx, "kv/deleterange", false, etcdDelete{Key: []byte(s.prefix + key), PrevKV: true}, &r)
		if err != nil || len(r.PrevKVs) == 0 {
			return err
		}
		return s.dropOf(ctx, r.PrevKVs[0].Value)
	})
}

// List implements [Store].
func (s *etcdStore) List(ctx context.Context, prefix string) (entries []Entry, revision uint64, err error) {
	err = s.call(ctx, CheckPrefix(prefix), func(ctx context.Context) error {
		entries, revision, err = s.list(ctx, prefix, "KEY")
		return err
	})
	return entries, revision, err
}

// list returns the entries at one revision, in the given order. It starts again if a value in parts is
// replaced meanwhile.
func (s *etcdStore) list(ctx context.Context, prefix, order string) ([]Entry, uint64, error) {
	key := []byte(s.prefix + prefix)
	for {
		var r etcdRangeAnswer
		if err := s.gateway.call(ctx, "kv/range", true, etcdRange{key, after(key), "ASCEND", order}, &r); err != nil {
			return nil, 0, err
		}
		var entries []Entry
		for i := range r.KVs {
			e, whole, err := s.entry(ctx, &r.KVs[i])
			if err != nil {
				return nil, 0, err
			}
			if !whole {
				break
			}
			if !strings.HasPrefix(e.Key, "@") || strings.HasPrefix(prefix, "@") {
				entries = append(entries, e)
			}
			if i == len(r.KVs)-1 {
				return entries, r.Header.Revision, nil
			}
		}
		if len(r.KVs) == 0 {
			return nil, r.Header.Revision, nil
		}
	}
}

// after returns the end of the range of keys that begin with prefix.
func after(prefix []byte) []byte {
	end := slices.Clone(prefix)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i] < 0xff {
			end[i]++
			return end[:i+1]
		}
	}
	return []byte{0}
}

// entry decodes an entry. It reports false if its value has been replaced meanwhile.
func (s *etcdStore) entry(ctx context.Context, kv *etcdKV) (Entry, bool, error) {
	key := string(kv.Key[len(s.prefix):])
	if strings.HasPrefix(key, "@") {
		return Entry{Key: key}, true, nil // a part
	}
	value, whole, err := s.load(ctx, kv.Value)
	return Entry{Key: key, Value: value, Revision: kv.ModRevision}, whole, err
}

// Changes implements [Store].
func (s *etcdStore) Changes(
	ctx context.Context, prefix string, since uint64,
) (entries []Entry, revision uint64, err error) {
	err = s.call(ctx, CheckPrefix(prefix), func(ctx context.Context) error {
		if since == 0 {
			if entries, revision, err = s.list(ctx, prefix, "MOD"); len(entries) > 0 || err != nil {
				return err
			}
			since = revision
		}
		for {
			var got etcdEvents
			if got, err = s.watch(ctx, prefix, since); err != nil {
				return err
			}
			if entries, err = s.latest(ctx, &got); len(entries) > 0 || err != nil {
				revision = got.last()
				return err
			}
			since = got.last() // parts only
		}
	})
	return entries, revision, err
}

// latest returns the last state of each key in a batch of events, in order.
func (s *etcdStore) latest(ctx context.Context, got *etcdEvents) (entries []Entry, err error) {
	last := map[string]int{}
	for i := range got.Result.Events {
		last[string(got.Result.Events[i].KV.Key)] = i
	}
	for i := range got.Result.Events {
		kv := &got.Result.Events[i].KV
		if last[string(kv.Key)] != i || strings.HasPrefix(string(kv.Key[len(s.prefix):]), "@") {
			continue
		}
		if got.Result.Events[i].Type == "DELETE" {
			entries = append(entries, Entry{Key: string(kv.Key[len(s.prefix):]), Revision: kv.ModRevision, Deleted: true})
			continue
		}
		e, whole, err := s.entry(ctx, kv)
		if err != nil {
			return nil, err
		}
		if whole { // else it was replaced meanwhile: its current value comes with a later event
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// A value of up to etcdPart bytes is stored after a zero byte: etcd refuses requests of more than 1.5 MiB. A
// larger one is stored in parts, under separate keys that are never changed, and the key holds a one byte,
// the parts' random name and their number. A writer that replaces the value deletes the parts afterwards; a
// reader that finds them missing reads again.
const (
	etcdPart  = 1 << 20
	etcdPlain = 0
	etcdParts = 1
	partsName = 26 // of rand.Text
)

// save returns the stored form of a value, and the name of its parts if there are any.
func (s *etcdStore) save(ctx context.Context, value []byte) (stored []byte, parts string, err error) {
	if len(value) <= etcdPart {
		return append([]byte{etcdPlain}, value...), "", nil
	}
	parts = rand.Text()
	n := uint32(0)
	for piece := range slices.Chunk(value, etcdPart) {
		// No other client uses this part: it may be written twice.
		if err := s.gateway.call(ctx, "kv/put", true, etcdPut{Key: []byte(s.part(parts, n)), Value: piece},
			&struct{}{}); err != nil {
			return nil, parts, err
		}
		n++
	}
	stored = append([]byte{etcdParts}, parts...)
	return binary.BigEndian.AppendUint32(stored, n), parts, nil
}

// part returns the key of a part. No key of a store begins with "@".
func (s *etcdStore) part(parts string, n uint32) string {
	return fmt.Sprintf("%s@parts/%s/%08d", s.prefix, parts, n)
}

// load returns the value of a stored form. It reports false if its parts are missing.
func (s *etcdStore) load(ctx context.Context, stored []byte) (value []byte, whole bool, err error) {
	parts, n, ok := partsOf(stored)
	switch {
	case len(stored) > 0 && stored[0] == etcdPlain:
		return stored[1:], true, nil
	case !ok:
		return nil, false, errors.New("etcd: a value that was not written by a store")
	}
	for i := range n {
		var r etcdRangeAnswer
		err := s.gateway.call(ctx, "kv/range", true, etcdRange{Key: []byte(s.part(parts, i))}, &r)
		if err != nil || len(r.KVs) == 0 {
			return nil, false, err
		}
		value = append(value, r.KVs[0].Value...)
	}
	return value, true, nil
}

// partsOf decodes the stored form of a value in parts.
func partsOf(stored []byte) (parts string, n uint32, ok bool) {
	if len(stored) != 1+partsName+4 || stored[0] != etcdParts {
		return "", 0, false
	}
	return string(stored[1 : 1+partsName]), binary.BigEndian.Uint32(stored[1+partsName:]), true
}

// dropOf deletes the parts of a value, if it has any.
func (s *etcdStore) dropOf(ctx context.Context, stored []byte) error {
	parts, _, _ := partsOf(stored)
	return s.drop(ctx, parts)
}

func (s *etcdStore) drop(ctx context.Context, parts string) error {
	if parts == "" {
		return nil
	}
	key := []byte(s.prefix + "@parts/" + parts + "/")
	return s.gateway.call(ctx, "kv/deleterange", true, etcdDelete{Key: key, End: after(key)}, &struct{}{})
}
