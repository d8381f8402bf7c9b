package rendezvous

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
)

// Exchange is an all-gather through the store: it returns the values of all workers, by worker. It waits for
// all of them until ctx ends; the error is then a *[WaitError] that names the missing workers. The key must
// be unique to this exchange (see [Key]). A value has at most [ValueMax] bytes, and stays in the store until
// the epoch's keys are deleted.
func Exchange(ctx context.Context, s Store, key string, worker, workers int, mine []byte) ([][]byte, error) {
	record, err := collect(ctx, s, key, worker, workers, mine, func(values [][]byte) []byte {
		return pack(joined(values))
	})
	var values [][]byte
	if err == nil {
		if record, err = unpack(record); err == nil {
			values, err = split(record, workers)
		}
	}
	if late := (*WaitError)(nil); err != nil && !errors.As(err, &late) {
		err = fmt.Errorf("rendezvous: exchange %q: %w", key, err)
	}
	return values, err
}

// joined encodes values: the length of each, and then all.
func joined(values [][]byte) (b []byte) {
	for _, v := range values {
		b = binary.AppendUvarint(b, uint64(len(v)))
	}
	for _, v := range values {
		b = append(b, v...)
	}
	return b
}

// split decodes what joined has encoded.
func split(b []byte, workers int) ([][]byte, error) {
	lengths := make([]uint64, workers)
	for i := range lengths {
		n, used := binary.Uvarint(b)
		if used <= 0 {
			return nil, fmt.Errorf("an invalid record: the length of value %d of %d", i, workers)
		}
		lengths[i], b = n, b[used:]
	}
	values := make([][]byte, workers)
	for i, n := range lengths {
		if n > uint64(len(b)) {
			return nil, fmt.Errorf("an invalid record: value %d of %d has %d bytes, %d are left", i, workers, n, len(b))
		}
		values[i], b = b[:n:n], b[n:]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("an invalid record: %d bytes follow the %d values", len(b), workers)
	}
	return values, nil
}
