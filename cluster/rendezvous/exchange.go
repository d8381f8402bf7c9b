package rendezvous

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
)

// Exchange is an all-gather through the store: it returns the values of all workers, by worker. It waits for
// all of them until ctx ends; the error is then a *[WaitError] that names the missing workers. The key must
// be unique to this exchange (see [Key]). A value has at most [ValueMax] bytes, and stays in the store until
// the epoch's keys are deleted.
func Exchange(ctx context.Context, s Store, key string, worker, workers int, mine []byte) ([][]byte, error) {
	if worker < 0 || worker >= workers {
		return nil, fmt.Errorf("rendezvous: exchange %q: worker %d of %d", key, worker, workers)
	}
	own := key + "/" + strconv.Itoa(worker)
	current, created, err := s.Create(ctx, own, mine)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: exchange %q: %w", key, err)
	}
	if !created && !bytes.Equal(current, mine) {
		return nil, fmt.Errorf("rendezvous: exchange %q: worker %d has already sent a different value", key, worker)
	}
	return gather(ctx, s, key, workers, "arrived")
}
