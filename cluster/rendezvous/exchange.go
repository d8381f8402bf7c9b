package rendezvous

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
)

// Exchange gives every worker what every worker gave, by worker. It waits for all of them until ctx ends; the error is then a
// *[WaitError] that says who is missing. The key names this exchange alone (see [Key]); what a worker gives, at most [ValueMax]
// bytes, stays in the store until the epoch's keys are deleted.
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
		return nil, fmt.Errorf("rendezvous: exchange %q: worker %d has given something else there before", key, worker)
	}
	return gather(ctx, s, key, workers, "arrived")
}

// Barrier waits until every worker has come to it, or ctx ends; the error is then a *[WaitError]. The key names this barrier alone.
func Barrier(ctx context.Context, s Store, key string, worker, workers int) error {
	_, err := Exchange(ctx, s, key, worker, workers, nil)
	return err
}
