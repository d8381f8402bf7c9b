package rendezvous

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

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
		numbers(e.Missing), e.Workers, e.What, e.Cause)
}

// Unwrap returns the cause.
func (e *WaitError) Unwrap() error { return e.Cause }

// numbers formats increasing numbers of workers for display: "worker 3", "workers 0-2 and 7".
func numbers(n []int) string {
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
		return "worker " + runs[0]
	}
	return "workers " + enumerate(runs)
}

// enumerate formats a list for display: "a, b and c".
func enumerate(items []string) string {
	if len(items) < 2 {
		return strings.Join(items, "")
	}
	last := len(items) - 1
	return strings.Join(items[:last], ", ") + " and " + items[last]
}
