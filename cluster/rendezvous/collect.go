package rendezvous

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"
)

// In a wait of all workers for all workers, each worker that follows the keys of the others makes up to one request for
// each of them. So only a few do, the collectors: the first one that has seen all keys writes a record of them, and all
// other workers wait for that record alone.

// collectorsMax is the number of collectors of a wait. Up to as many workers all follow each other.
const collectorsMax = 8

// collector returns the i-th collector, and false if there are no more. The workers are cut into blocks of
// collectorStep; each block has one collector, whose place in it differs from block to block by the triangular
// numbers. So the collectors are on several hosts whether the workers are numbered host by host or in turn over the
// hosts: equal distances would put all of them on one host if its number of hosts divides the distance.
func collector(i, workers int) (int, bool) {
	step := collectorStep(workers)
	return min(i*step+i*(i+1)/2%step, workers-1), i*step < workers
}

// collects reports whether a worker is a collector. Worker 0 always is.
func collects(worker, workers int) bool {
	c, _ := collector(worker/collectorStep(workers), workers)
	return c == worker
}

// collectorStep is the number of workers of each of which one is a collector.
func collectorStep(workers int) int { return (workers + collectorsMax - 1) / collectorsMax }

// collectorsMissing returns a function that looks up which collectors have no key "<prefix><number>" yet. Workers that
// do not collect report these.
func collectorsMissing(s Store, prefix string, workers int) func(context.Context) []int {
	return func(ctx context.Context) (missing []int) {
		for i := 0; ; i++ {
			w, ok := collector(i, workers)
			if !ok {
				return missing
			}
			if _, _, err := s.Get(ctx, prefix+strconv.Itoa(w)); errors.Is(err, ErrNotFound) {
				missing = append(missing, w)
			}
		}
	}
}

// lookEvery is how long the workers wait for the collectors before one worker of each block looks itself whether all
// keys are there, and then the next one: the collectors may have failed.
const lookEvery = 5 * time.Second

// lookTurns are the times at which a worker that waits for the collectors' record looks at the keys of all itself.
type lookTurns struct {
	next  time.Time
	cycle time.Duration
}

func newLookTurns(worker, workers int) lookTurns {
	step := collectorStep(workers)
	c, _ := collector(worker/step, workers)
	turn := (worker - c + step) % step // 1 to step-1: the collector has 0
	return lookTurns{time.Now().Add(time.Duration(turn) * lookEvery), time.Duration(step-1) * lookEvery}
}

// waitTurn calls wait with a context that ends with ctx, or at the worker's next turn. It reports whether wait ended
// because of that turn; what wait has read by then is incomplete, and its error is dropped.
func (d *lookTurns) waitTurn(ctx context.Context, wait func(context.Context)) bool {
	until, cancel := context.WithDeadline(ctx, d.next)
	defer cancel()
	wait(until)
	if until.Err() == nil || ctx.Err() != nil || time.Now().Before(d.next) {
		return false
	}
	d.next = time.Now().Add(d.cycle)
	return true
}

// recordKey is the part of the key of the record of an exchange or a comparison, below its key. No worker's key
// begins with it.
const recordKey = "/all"

// collect waits until every worker has a key "<key>/<number>". A collector gets their values, by worker, and writes the
// record that summarize returns for them, if workers exist that do not collect. The others get that record, or the
// values if the collectors have failed.
func collect(
	ctx context.Context, s Store, key string, worker, workers int, summarize func(values [][]byte) []byte,
) (values [][]byte, record []byte, err error) {
	if !collects(worker, workers) {
		return await(ctx, s, key, worker, workers, summarize)
	}
	values, err = gather(ctx, s, key, workers, "arrived")
	if err != nil || workers <= collectorsMax {
		return values, nil, err
	}
	return values, nil, publish(ctx, s, key, summarize(values))
}

// publish writes the record of an exchange or a comparison. It ignores a store that cannot take it, or is lost: this
// worker has all values, and the others look themselves when it is their turn.
func publish(ctx context.Context, s Store, key string, record []byte) error {
	if _, _, err := s.Create(ctx, key+recordKey, record); errors.Is(err, ErrFenced) {
		return err
	}
	return nil
}

// await waits for the record of an exchange or a comparison. At its turns, and when ctx ends, it looks for the values
// themselves: they are there if only the collectors have failed.
func await(
	ctx context.Context, s Store, key string, worker, workers int, summarize func(values [][]byte) []byte,
) (values [][]byte, record []byte, err error) {
	since := time.Now()
	report := reportWait(ctx, Waiting{Role: roleDefault, Workers: workers, Key: key, done: "arrived"})
	report.lookup(collectorsMissing(s, key+"/", workers))
	defer report.stop()
	turns := newLookTurns(worker, workers)
	for after := uint64(0); err == nil; {
		var entries []Entry
		var revision uint64
		if turns.waitTurn(ctx, func(ctx context.Context) {
			entries, revision, err = s.Changes(ctx, key+recordKey, after)
			if errors.Is(err, ErrCompacted) {
				entries, revision, err = s.List(ctx, key+recordKey)
			}
		}) && err != nil {
			if values, missing, failed := valuesNow(ctx, s, key, workers); failed == nil && len(missing) == 0 {
				return values, nil, publish(ctx, s, key, summarize(values))
			}
			err = nil
			continue
		}
		if err != nil {
			break
		}
		after = revision
		for _, e := range entries {
			if e.Key == key+recordKey && !e.Deleted {
				return nil, e.Value, nil
			}
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
	defer cancel()
	values, missing, failed := valuesNow(last, s, key, workers)
	if failed != nil || len(missing) > 0 {
		return nil, nil, &WaitError{key, missing, workers, time.Since(since), err}
	}
	return values, nil, nil
}

// valuesNow returns the values of all workers that have a key "<key>/<number>", and those that have none.
func valuesNow(ctx context.Context, s Store, key string, workers int) (values [][]byte, missing []int, err error) {
	entries, _, err := s.List(ctx, key+"/")
	if err != nil {
		return nil, nil, err
	}
	now := map[string]Entry{}
	merge(now, entries, key+"/")
	values = make([][]byte, workers)
	for w := range values {
		values[w] = now[strconv.Itoa(w)].Value
	}
	return values, absent(now, "", workers), nil
}

// listValues returns the values of all workers, which all have been written, without a record.
func listValues(ctx context.Context, s Store, key string, workers int) ([][]byte, error) {
	values, missing, err := valuesNow(ctx, s, key, workers)
	if err == nil && len(missing) > 0 {
		err = fmt.Errorf("the value of %s was deleted", numbers(roleDefault, missing))
	}
	return values, err
}

// Size limits of a record. A longer one is not written: then each worker reads the values themselves.
const (
	recordMax  = 1 << 20 // bytes as it is stored: etcd's servers accept a little more than that in one request
	valuesMax  = 1 << 23 // bytes of all values and their lengths: more would hardly shrink to recordMax
	countBytes = 4       // of a record without the values
	recordHead = 8       // bytes before the compressed ones
	deflateMax = 1100    // how often DEFLATE shrinks bytes at most, rounded up
)

// pack encodes values as one record: the number of values (4 bytes) and the size of the rest before its compression by
// DEFLATE (4): the length of each value, and the values. Values that repeat one another, as those of the workers of a
// host do, take little space. It returns the number of values alone if the record were too long.
func pack(values [][]byte) []byte {
	count := binary.LittleEndian.AppendUint32(nil, uint32(len(values)))
	var lengths []byte
	total := 0
	for _, v := range values {
		lengths = binary.AppendUvarint(lengths, uint64(len(v)))
		if total += len(v); total+len(lengths) > valuesMax {
			return count
		}
	}
	out := bytes.NewBuffer(binary.LittleEndian.AppendUint32(bytes.Clone(count), uint32(total+len(lengths))))
	w, err := flate.NewWriter(out, flate.DefaultCompression)
	if err != nil {
		panic(err) // the level is valid
	}
	w.Write(lengths) // to memory: no error
	for _, v := range values {
		w.Write(v)
	}
	if w.Close(); out.Len() > recordMax {
		return count
	}
	return out.Bytes()
}

// unpack decodes what pack has encoded. It returns nil without an error if the record does not contain the values.
func unpack(record []byte, workers int) ([][]byte, error) {
	if len(record) < countBytes || binary.LittleEndian.Uint32(record) != uint32(workers) {
		return nil, fmt.Errorf("an invalid record of %d bytes: want the values of %d workers", len(record), workers)
	}
	if len(record) == countBytes {
		return nil, nil
	}
	size := 0
	if len(record) > recordHead {
		size = int(binary.LittleEndian.Uint32(record[countBytes:]))
	}
	if size > min(valuesMax, deflateMax*len(record)) {
		return nil, fmt.Errorf("an invalid record of %d bytes, decompressed %d", len(record), size)
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(flate.NewReader(bytes.NewReader(record[min(recordHead, len(record)):])), b); err != nil {
		return nil, fmt.Errorf("an invalid record of %d bytes: %w", len(record), err)
	}
	lengths, total := make([]int, workers), uint64(0)
	for i := range lengths {
		n, used := binary.Uvarint(b)
		if used <= 0 || n > valuesMax {
			return nil, fmt.Errorf("an invalid record: the length of value %d", i)
		}
		b, total, lengths[i] = b[used:], total+n, int(n)
	}
	if total != uint64(len(b)) {
		return nil, fmt.Errorf("an invalid record: %d bytes of values, want %d", len(b), total)
	}
	values := make([][]byte, workers)
	for i, n := range lengths {
		values[i], b = b[:n:n], b[n:]
	}
	return values, nil
}
