package timeline

import "sync/atomic"

// ring keeps the last records of a fixed number of words each. Any goroutine may add and read records at any time.
//
// The first word of a slot is its version: 2n for the complete record n (from 1), 2n-1 while it is written. A reader
// that finds an odd version, or another one after reading than before, drops the record.
type ring struct {
	width   int    // words of a record
	mask    uint64 // number of slots minus 1
	next    atomic.Uint64
	dropped atomic.Uint64 // records that were not written, because an older one was being written into their slot
	words   []atomic.Uint64
}

// newRing returns a ring of at least n records.
func newRing(n, width int) *ring {
	size := 1
	for size < n {
		size *= 2
	}
	return &ring{width: width, mask: uint64(size - 1), words: make([]atomic.Uint64, size*(width+1))}
}

func (r *ring) add(record []uint64) {
	n := r.next.Add(1)
	slot := r.words[int(n&r.mask)*(r.width+1):][:r.width+1]
	before := slot[0].Load()
	if before%2 == 1 || before > 2*n || !slot[0].CompareAndSwap(before, 2*n-1) {
		r.dropped.Add(1)
		return
	}
	for i, word := range record {
		slot[i+1].Store(word)
	}
	slot[0].Store(2 * n)
}

// last calls visit with the complete records after number n, oldest first, and returns the number of the last record.
// The slice is reused.
func (r *ring) last(n uint64, visit func(record []uint64)) uint64 {
	end := r.next.Load()
	if size := r.mask + 1; end > size {
		n = max(n, end-size)
	}
	record := make([]uint64, r.width)
	for n++; n <= end; n++ {
		slot := r.words[int(n&r.mask)*(r.width+1):][:r.width+1]
		if slot[0].Load() != 2*n {
			continue
		}
		for i := range record {
			record[i] = slot[i+1].Load()
		}
		if slot[0].Load() == 2*n {
			visit(record)
		}
	}
	return end
}
