package etcd

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/lockstep-ml/lockstep/internal/pause"
)

// A value of up to partBytes is stored after a zero byte. A larger one is stored in parts, under separate
// keys that are never changed, and the key holds a one byte, the parts' random name and their number. A
// writer that replaces the value deletes the parts afterwards; a reader that finds them missing reads again.
const (
	partBytes  = 1 << 20
	plainValue = 0
	partsValue = 1
	nameBytes  = 26 // of rand.Text
)

// save returns the stored form of a value, and the name of its parts if there are any.
func (s *store) save(ctx context.Context, value []byte) (stored []byte, parts string, err error) {
	if len(value) <= partBytes {
		return append([]byte{plainValue}, value...), "", nil
	}
	parts = rand.Text()
	n := uint32(0)
	for ; len(value) > 0; n++ {
		size := min(len(value), partBytes)
		// No other client uses this part: it may be written twice.
		if err := s.repeat(ctx, func(ctx context.Context) error {
			_, err := s.client.Put(ctx, s.part(parts, n), string(value[:size]))
			return err
		}); err != nil {
			return nil, parts, err
		}
		value = value[size:]
	}
	stored = append([]byte{partsValue}, parts...)
	return binary.BigEndian.AppendUint32(stored, n), parts, nil
}

// part returns the key of a part. No key of a store begins with "@".
func (s *store) part(parts string, n uint32) string {
	return fmt.Sprintf("%s@parts/%s/%08d", s.prefix, parts, n)
}

// isPart reports whether an entry of etcd is a part of another entry's value.
func (s *store) isPart(kv *mvccpb.KeyValue) bool {
	return strings.HasPrefix(string(kv.Key[len(s.prefix):]), "@")
}

// load returns the value of a stored form. It reports false if its parts are missing.
func (s *store) load(ctx context.Context, stored []byte) (value []byte, whole bool, err error) {
	switch {
	case len(stored) > 0 && stored[0] == plainValue:
		return stored[1:], true, nil
	case len(stored) != 1+nameBytes+4 || stored[0] != partsValue:
		return nil, false, errors.New("etcd: a value that was not written by a store")
	}
	parts, n := string(stored[1:1+nameBytes]), binary.BigEndian.Uint32(stored[1+nameBytes:])
	for i := range n {
		r, err := s.get(ctx, s.part(parts, i))
		if err != nil || len(r.Kvs) == 0 {
			return nil, false, err
		}
		value = append(value, r.Kvs[0].Value...)
	}
	return value, true, nil
}

// tears has the latest revision at which each key's value lacked a part.
type tears map[string]int64

// again returns nil after a pause if a value that lacks parts can be read again: a writer has replaced it meanwhile.
// Such a writer deletes the parts afterwards, so a key that still has the same revision will never have them.
func (t tears) again(ctx context.Context, kv *mvccpb.KeyValue) error {
	if t[string(kv.Key)] == kv.ModRevision {
		return fmt.Errorf("etcd: the value of key %q is incomplete: another program deleted parts of it; delete the key",
			kv.Key)
	}
	t[string(kv.Key)] = kv.ModRevision
	return pause.For(ctx, tornPause)
}

// tornPause is how long a reader waits before it reads a value again that a writer has replaced meanwhile.
const tornPause = 5 * time.Millisecond

// dropOf deletes the parts of a value, if it has any.
func (s *store) dropOf(ctx context.Context, stored []byte) error {
	if len(stored) == 1+nameBytes+4 && stored[0] == partsValue {
		return s.drop(ctx, string(stored[1:1+nameBytes]))
	}
	return nil
}

func (s *store) drop(ctx context.Context, parts string) error {
	if parts == "" {
		return nil
	}
	return s.repeat(ctx, func(ctx context.Context) error {
		_, err := s.client.Delete(ctx, s.prefix+"@parts/"+parts+"/", clientv3.WithPrefix())
		return err
	})
}
