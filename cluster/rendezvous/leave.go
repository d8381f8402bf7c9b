package rendezvous

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
)

// Leave reports that a worker that joined no longer needs the store. Worker 0 waits until all others have
// left, or ctx ends; the error is then a *[WaitError]. So the worker that serves the store leaves last.
func Leave(ctx context.Context, s Store, own Registration) error {
	own, err := own.filled()
	if err != nil {
		return err
	}
	key := own.Key("worker/left")
	if err := s.Set(ctx, key+"/"+strconv.Itoa(own.Worker), nil); err != nil {
		return fmt.Errorf("rendezvous: %v leaves: %w", &own, err)
	}
	if own.Worker > 0 {
		return nil
	}
	_, err = gather(ctx, s, key, own.Workers, "left")
	return err
}

// DeleteJob deletes all keys of a job, in every epoch. Call it on a store that outlives the job if the job's id
// will be used again. No worker may be running any more.
func DeleteJob(ctx context.Context, s Store, job string) error {
	prefix := jobKey(job)
	entries, _, err := s.List(ctx, prefix)
	var keys []string
	for _, e := range entries {
		keys = append(keys, e.Key)
	}
	if err == nil {
		err = deleteKeys(ctx, s, keys)
	}
	if err == nil {
		err = s.Delete(ctx, jobsKey+prefix[:len(prefix)-1])
	}
	if err != nil {
		return fmt.Errorf("rendezvous: deleting the keys of job %q: %w", job, err)
	}
	return nil
}

// deletesMax is how many keys are deleted at the same time.
const deletesMax = 32

// deleteKeys deletes keys, up to deletesMax at a time, in any order. It returns the first error, which ends the other
// requests. No request is in progress any more when it returns.
func deleteKeys(ctx context.Context, s Store, keys []string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var work sync.WaitGroup
	for share := range slices.Chunk(keys, max(1, (len(keys)+deletesMax-1)/deletesMax)) {
		work.Go(func() {
			for _, key := range share {
				if err := s.Delete(ctx, key); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	work.Wait()
	return context.Cause(ctx)
}
