package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// follow calls look with all entries whose keys begin with prefix, by the rest of the key: at once, and after
// each change, until look returns true, or ctx ends.
func follow(ctx context.Context, s Store, prefix string, look func(now map[string]Entry) (done bool, err error)) error {
	for {
		entries, revision, err := s.List(ctx, prefix)
		if err != nil {
			return err
		}
		now := map[string]Entry{}
		for {
			merge(now, entries, prefix)
			if done, err := look(now); done || err != nil {
				return err
			}
			if entries, revision, err = s.Changes(ctx, prefix, revision); err != nil {
				break
			}
		}
		if !errors.Is(err, ErrCompacted) {
			return err
		}
	}
}

// merge applies changes to the entries in now, by the rest of the key after prefix.
func merge(now map[string]Entry, changes []Entry, prefix string) {
	for _, e := range changes {
		name := strings.TrimPrefix(e.Key, prefix)
		if now[name] = e; e.Deleted {
			delete(now, name)
		}
	}
}

// WaitError reports which workers a wait timed out for.
type WaitError struct {
	// What is the key that was waited for.
	What string
	// Missing are the workers that have not arrived, and Workers is the number of workers. Missing is empty if the
	// store, which knows them, is lost.
	Missing []int
	Workers int
	// Waited is how long the wait lasted.
	Waited time.Duration
	// Cause is why it ended: the context's cause, or the store's error.
	Cause error
}

// Error names the missing workers, the key and the time.
func (e *WaitError) Error() string {
	if len(e.Missing) == 0 {
		return fmt.Sprintf("rendezvous: waited %v for the other workers of %d at %q: %v", e.Waited.Round(time.Millisecond),
			e.Workers, e.What, e.Cause)
	}
	return fmt.Sprintf("rendezvous: waited %v for %s of %d at %q: %v", e.Waited.Round(time.Millisecond),
		numbers("worker", e.Missing), e.Workers, e.What, e.Cause)
}

// Unwrap returns the cause.
func (e *WaitError) Unwrap() error { return e.Cause }

// gather waits until every worker has a key "<key>/<number>", and returns their values, by worker. done is
// the participle for workers that have one, such as "arrived".
func gather(ctx context.Context, s Store, key string, workers int, done string) ([][]byte, error) {
	since := time.Now()
	out := make([][]byte, workers)
	missing := make([]int, 0, workers)
	for w := range workers {
		missing = append(missing, w)
	}
	report := reportWait(ctx, Waiting{
		Role: roleDefault, Missing: slices.Clone(missing), Workers: workers, Key: key,
		done: done,
	})
	defer report.stop()
	err := follow(ctx, s, key+"/", func(now map[string]Entry) (bool, error) {
		missing = slices.DeleteFunc(missing, func(w int) bool {
			e, ok := now[strconv.Itoa(w)]
			if ok {
				out[w] = e.Value
			}
			return ok
		})
		report.missing(missing)
		return len(missing) == 0, nil
	})
	if err != nil {
		return nil, &WaitError{key, missing, workers, time.Since(since), err}
	}
	return out, nil
}

// numbers formats increasing numbers for display: "worker 3", "workers 0-2 and 7".
func numbers(noun string, n []int) string {
	var runs []string
	for i := 0; i < len(n); {
		j := i
		for j+1 < len(n) && n[j+1] == n[j]+1 {
			j++
		}
		switch {
		case j == i:
			runs = append(runs, strconv.Itoa(n[i]))
		case j == i+1:
			runs = append(runs, strconv.Itoa(n[i]), strconv.Itoa(n[j]))
		default:
			runs = append(runs, fmt.Sprintf("%d-%d", n[i], n[j]))
		}
		i = j + 1
	}
	const most = 16
	if len(runs) > most {
		runs = append(runs[:most], "others")
	}
	if len(n) == 1 {
		return noun + " " + runs[0]
	}
	return noun + "s " + enumerate(runs)
}

// enumerate formats a list for display: "a, b and c".
func enumerate(items []string) string {
	if len(items) < 2 {
		return strings.Join(items, "")
	}
	last := len(items) - 1
	return strings.Join(items[:last], ", ") + " and " + items[last]
}
