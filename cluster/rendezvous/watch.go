package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/lockstep-ml/lockstep/internal/pause"
)

// Watch calls f with the changes of the keys that begin with prefix, after a revision, as [Store].Changes returns them,
// until f or the store returns an error, which Watch returns. With revision 0 the first changes are all entries; so are
// they again if the store has discarded deletions meanwhile ([ErrCompacted]). after is the revision up to which f has
// got the changes: a further call continues there.
func Watch(ctx context.Context, s Store, prefix string, after *uint64, f func(changes []Entry) error) error {
	for {
		entries, revision, err := s.Changes(ctx, prefix, *after)
		switch {
		case errors.Is(err, ErrCompacted):
			*after = 0
			continue
		case err == nil:
			*after = revision
			err = f(entries)
		}
		if err != nil {
			return err
		}
	}
}

// Replace writes a value in place of the one that the key has had since a revision; 0: in place of none. It reports
// false if another process was faster. A store that does not know whether it has written, such as one between two
// leaders, is read after a pause, and written again if necessary, until ctx ends or the store is lost. No other process
// may write the same value.
func Replace(
	ctx context.Context, s Store, key string, revision uint64, value []byte, retry time.Duration,
) (done bool, err error) {
	for {
		if revision == 0 {
			_, done, err = s.Create(ctx, key, value)
		} else {
			done, err = s.Swap(ctx, key, revision, value)
		}
		for known := err == nil; !known; {
			if Final(err) || pause.For(ctx, retry) != nil || ctx.Err() != nil {
				return false, err
			}
			now, at, e := s.Get(ctx, key)
			switch none := errors.Is(e, ErrNotFound); {
			case e == nil && bytes.Equal(now, value):
				return true, nil
			case none && revision != 0, e == nil && at != revision:
				return false, nil
			case e == nil || none:
				known = true
			case ctx.Err() == nil:
				err = e
			}
		}
		if err == nil {
			return done, nil
		}
	}
}

// Final reports whether a store would return this error of a write again: it is lost, closed or full.
func Final(err error) bool {
	return errors.Is(err, ErrLost) || errors.Is(err, ErrClosed) || errors.Is(err, ErrFull)
}
