package rendezvous

import (
	"bytes"
	"cmp"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"
)

// recordKey is the part of the key of the record of an exchange or a comparison, below its key. No worker's key
// begins with it.
const recordKey = "/all"

// collect writes this worker's value below a key, waits until every worker has done so, and returns the record that
// summarize makes of the values, by worker. If all read the values of all, they would send n² of them: so worker 0 does
// it for all, and the others wait for its record alone. One whose time is over first reads the values itself: they are
// all there if only worker 0 has failed.
func collect(
	ctx context.Context, s Store, key string, worker, workers int, mine []byte, summarize func(values [][]byte) []byte,
) ([]byte, error) {
	if err := contribute(ctx, s, key, worker, workers, mine); err != nil {
		return nil, err
	}
	if worker == 0 {
		values, err := gather(ctx, s, key, workers, "arrived")
		if err != nil {
			return nil, err
		}
		record := summarize(values)
		written := record
		if len(written) > ValueMax {
			written = nil // each worker reads the values
		}
		_, _, err = s.Create(ctx, key+recordKey, written)
		return record, err
	}
	since := time.Now()
	report := reportWait(ctx, Waiting{Workers: workers, Key: key, done: "arrived"},
		looksFor(s, key+"/", worker, workers))
	defer report.stop()
	entries, err := s.Wait(ctx, key+recordKey, 1)
	if err == nil && len(entries[0].Value) > 0 {
		return entries[0].Value, nil
	}
	values, missing, failed := valuesNow(ctx, s, key, workers)
	switch {
	case failed == nil && len(missing) == 0:
		return summarize(values), nil
	case err == nil:
		err = cmp.Or(failed, errors.New("its value was deleted from the store"))
	}
	return nil, &WaitError{key, missing, workers, time.Since(since), err}
}

// Contributed reports whether the others need nothing more of a worker for an exchange or a comparison: of worker 0
// they need the record.
func Contributed(ctx context.Context, s Store, key string, worker int) bool {
	own := "/" + strconv.Itoa(worker)
	if worker == 0 {
		own = recordKey
	}
	_, _, err := s.Get(ctx, key+own)
	return !errors.Is(err, ErrNotFound)
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

// gather waits until every worker has a key "<key>/<number>", and returns their values, by worker. done is the
// participle for workers that have one, such as "arrived".
func gather(ctx context.Context, s Store, key string, workers int, done string) ([][]byte, error) {
	since := time.Now()
	report := reportWait(ctx, Waiting{Workers: workers, Key: key, done: done},
		looksFor(s, key+"/", 0, workers))
	defer report.stop()
	for n := workers; ; {
		entries, err := s.Wait(ctx, key+"/", n)
		if err != nil {
			values, missing, failed := valuesNow(ctx, s, key, workers)
			if failed != nil || len(missing) > 0 {
				return nil, &WaitError{key, missing, workers, time.Since(since), err}
			}
			return values, nil
		}
		values, missing := byWorker(entries, key+"/", workers)
		if len(missing) == 0 {
			return values, nil
		}
		n = len(entries) + 1 // some are keys of another exchange, whose key begins with this one
	}
}

// valuesNow returns the values of all workers that have a key "<key>/<number>", and those that have none. It reads them
// also if the time of ctx is over.
func valuesNow(ctx context.Context, s Store, key string, workers int) (values [][]byte, missing []int, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
	defer cancel()
	entries, _, err := s.List(ctx, key+"/")
	if err != nil {
		return nil, nil, err
	}
	values, missing = byWorker(entries, key+"/", workers)
	return values, missing, nil
}

// byWorker returns the values of keys "<prefix><number>" by worker, and the workers without a key.
func byWorker(entries []Entry, prefix string, workers int) (values [][]byte, missing []int) {
	now := map[string][]byte{}
	for _, e := range entries {
		now[e.Key] = e.Value
	}
	values = make([][]byte, workers)
	for w := range values {
		value, here := now[prefix+strconv.Itoa(w)]
		if values[w] = value; !here {
			missing = append(missing, w)
		}
	}
	return values, missing
}

// Size limits of a record before its compression.
const (
	unpackedMax = 64 << 20 // bytes
	deflateMax  = 1100     // how often DEFLATE shrinks bytes at most, rounded up
)

// pack compresses a record: its size (4 bytes), and DEFLATE. What the workers of a host have in common takes little
// space.
func pack(record []byte) []byte {
	out := bytes.NewBuffer(binary.LittleEndian.AppendUint32(nil, uint32(len(record))))
	w, err := flate.NewWriter(out, flate.DefaultCompression)
	if err != nil {
		panic(err) // the level is valid
	}
	w.Write(record) // to memory: no error
	w.Close()
	return out.Bytes()
}

// unpack decodes what pack has encoded.
func unpack(packed []byte) ([]byte, error) {
	if len(packed) < 4 {
		return nil, fmt.Errorf("an invalid record of %d bytes", len(packed))
	}
	size := int64(binary.LittleEndian.Uint32(packed))
	if size > min(unpackedMax, deflateMax*int64(len(packed))) {
		return nil, fmt.Errorf("an invalid record of %d bytes, decompressed %d", len(packed), size)
	}
	record := make([]byte, size)
	if _, err := io.ReadFull(flate.NewReader(bytes.NewReader(packed[4:])), record); err != nil {
		return nil, fmt.Errorf("an invalid record of %d bytes: %w", len(packed), err)
	}
	return record, nil
}
