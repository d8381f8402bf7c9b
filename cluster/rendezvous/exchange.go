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
	if err := contribute(ctx, s, key, worker, workers, mine); err != nil {
		return nil, fmt.Errorf("rendezvous: exchange %q: %w", key, err)
	}
	values, record, err := collect(ctx, s, key, worker, workers, pack)
	if values != nil || err != nil {
		return values, err
	}
	if values, err = unpack(record, workers); values == nil && err == nil {
		values, err = listValues(ctx, s, key, workers)
	}
	if err != nil {
		return nil, fmt.Errorf("rendezvous: exchange %q: %w", key, err)
	}
	return values, nil
}

// contribute writes a worker's value of an exchange or a comparison.
func contribute(ctx context.Context, s Store, key string, worker, workers int, mine []byte) error {
	if worker < 0 || worker >= workers {
		return fmt.Errorf("worker %d of %d", worker, workers)
	}
	current, created, err := s.Create(ctx, key+"/"+strconv.Itoa(worker), mine)
	if err == nil && !created && !bytes.Equal(current, mine) {
		err = fmt.Errorf("worker %d has already sent a different value", worker)
	}
	return err
}
