package rendezvous

import (
	"context"
	"fmt"
	"strconv"
)

// Leave reports that a worker that joined no longer needs the store. Worker 0 waits until all others have
// left, or ctx ends; the error is then a *[WaitError]. So the worker that serves the store leaves last.
func Leave(ctx context.Context, s Store, own Registration) error {
	own, err := own.filled()
	if err != nil {
		return err
	}
	key := own.Key(own.Role, "left")
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
	for _, e := range entries {
		if err == nil {
			err = s.Delete(ctx, e.Key)
		}
	}
	if err == nil {
		err = s.Delete(ctx, jobsKey+prefix[:len(prefix)-1])
	}
	if err != nil {
		return fmt.Errorf("rendezvous: deleting the keys of job %q: %w", job, err)
	}
	return nil
}
