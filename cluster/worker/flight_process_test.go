//go:build unix

package worker_test

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// TestFlightRecords: whatever happens to worker 1 of 3, the records of all show where the workers diverge.
func TestFlightRecords(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		do   string
		kind flight.Kind
		left []int // workers that leave records
		says string
	}{
		{"kill", flight.Absent, []int{0, 2}, `rank 1 has left no record`},
		{
			"sleep", flight.Absent,
			[]int{0, 1, 2},
			`rank 1 has not entered call 3, all_reduce SUM float32 [1] of "gradient", which ranks 0, 2 are in`,
		},
		{"other", flight.Differ, []int{0, 1, 2}, `rank 1 calls all_reduce SUM float32 [1] of "other"`},
	} {
		t.Run(test.do, func(t *testing.T) {
			t.Parallel()
			if test.do == "sleep" {
				race.SkipShort(t, "it waits 5 s for a worker")
			}
			records, store := t.TempDir(), freeStore(t)
			var all []*process
			for i := range 3 {
				c := child{
					Worker: i, Workers: 3, Replicas: 1, Store: store, Job: "flights", Steps: 6, At: -1, Timeout: testWait,
					Records: records,
				}
				if test.do == "sleep" {
					c.Timeout = 5 * time.Second
				}
				if i == 1 {
					c.At, c.Do = 3, test.do
				}
				all = append(all, start(t, c))
			}
			for i, p := range all {
				if i != 1 {
					p.says(t, "error")
				}
			}
			if test.do == "other" {
				all[1].says(t, "error")
			}
			if test.do == "sleep" { // it writes from another goroutine, perhaps after the others have ended
				wait(t, func() bool { return len(workersOf(t, records)) == 3 })
			}
			files := readFlights(t, records)
			if got := workersOf(t, records); !slices.Equal(got, test.left) {
				t.Errorf("records of workers %v, want %v", got, test.left)
			}
			var text strings.Builder
			r := flight.Find(files)
			if err := r.Print(&text); err != nil {
				t.Fatal(err)
			}
			if p := r.Parts[0]; p.Kind != test.kind || p.At != 3 || p.Common != 3 ||
				!strings.Contains(text.String(), test.says) {
				t.Errorf("%s at call %d after %d:\n%s\nwant %s, and %q", p.Kind, p.At, p.Common, text.String(), test.kind,
					test.says)
			}
			if !strings.Contains(text.String(), "pid "+strconv.Itoa(all[1].cmd.Process.Pid)) {
				t.Errorf("%s\ndoes not name the process %d", text.String(), all[1].cmd.Process.Pid)
			}
		})
	}
}

// TestFlightRequest: a worker that gets SIGUSR1 requests the records of all, and continues.
func TestFlightRequest(t *testing.T) {
	t.Parallel()
	records, store := t.TempDir(), freeStore(t)
	var all []*process
	for i := range 2 {
		c := child{
			Worker: i, Workers: 2, Replicas: 1, Store: store, Job: "flights", Steps: 6, At: -1, Timeout: testWait,
			Records: records,
		}
		if i == 1 {
			c.At, c.Do = 3, "wait"
		}
		all = append(all, start(t, c))
	}
	all[1].says(t, "joined")
	asked := func() bool {
		if err := all[0].cmd.Process.Signal(syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(workersOf(t, records), []int{0, 1}) {
			return false
		}
		p := flight.Find(readFlights(t, records)).Parts[0]
		return p.Kind == flight.Absent && slices.Equal(p.Blamed, []int{1}) && p.At == 3
	}
	all[0].says(t, "joined")
	wait(t, asked)
	all[1].goOn.Close()
	for _, p := range all {
		p.says(t, "done")
	}
}

func readFlights(t *testing.T, folder string) []flight.File {
	t.Helper()
	files, err := flight.Read(folder)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func workersOf(t *testing.T, folder string) (out []int) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(folder, "flight-0-*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(name), "flight-0-"), ".jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, n)
	}
	if _, err := os.Stat(folder); err != nil {
		t.Fatal(err)
	}
	return out
}

// wait waits until something holds.
func wait(t *testing.T, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(testWait); !holds(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("timed out")
		}
	}
}
