package shm_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

// The benchmarks measure two processes. The child makes the same calls until the Root of a header is not 0.

func init() {
	for name, b := range benches {
		parts["bench "+name] = func(c *child) error {
			ends, err := shm.Open(context.Background(), c.cfg)
			if err != nil {
				return err
			}
			defer ends[0].Close()
			call := b(ends[0], c.arg)
			for seq := uint64(0); ; seq++ {
				if stop, err := call(transport.Header{Seq: seq}); stop || err != nil {
					return err
				}
			}
		}
	}
}

// benches make a call of so many bytes; it reports whether rank 0 has requested the end.
var benches = map[string]func(m transport.Endpoint, bytes int) func(h transport.Header) (bool, error){
	"flags":   flags,
	"staging": staging,
	"frames":  frames,
}

var background = context.Background()

// begin enters a call.
func begin(m transport.Endpoint, slot transport.Slot) (stop bool, err error) {
	m.Memory().Publish(&slot)
	if err := m.Memory().Signal(0); err != nil {
		return false, err
	}
	if err := m.Memory().Await(background, -1, 0); err != nil {
		return false, err
	}
	return m.Memory().Peer(0).Root != 0, nil
}

// flags awaits flag 0 of all ranks.
func flags(m transport.Endpoint, _ int) func(h transport.Header) (bool, error) {
	return func(h transport.Header) (bool, error) { return begin(m, transport.Slot{Header: h}) }
}

// staging copies into the rank's staging buffer and out of the peer's, in one half for each call.
func staging(m transport.Endpoint, bytes int) func(h transport.Header) (bool, error) {
	data := make([]byte, bytes)
	return func(h transport.Header) (bool, error) {
		half := len(m.Memory().StagingBuffer(0)) / 2 * int(h.Seq&1)
		copy(m.Memory().StagingBuffer(m.Rank())[half:], data)
		stop, err := begin(m, transport.Slot{Header: h})
		copy(data, m.Memory().StagingBuffer(1 - m.Rank())[half:])
		return stop, err
	}
}

// frames exchanges a frame.
func frames(m transport.Endpoint, bytes int) func(h transport.Header) (bool, error) {
	out, in := make([]byte, bytes), make([]byte, bytes)
	stop := false
	m.Inspect(func(_ int, h transport.Header) error {
		stop = h.Root != 0
		return nil
	})
	return func(h transport.Header) (bool, error) {
		err := m.Exchange(background, 1-m.Rank(), transport.Frame{Header: h, Data: out}, 1-m.Rank(), in)
		return stop, err
	}
}

func BenchmarkFlags(b *testing.B) { bench(b, "flags", 0) }

func BenchmarkStagingBuffers(b *testing.B) {
	for _, bytes := range []int{4, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprint(bytes), func(b *testing.B) { bench(b, "staging", bytes) })
	}
}

func BenchmarkFrames(b *testing.B) {
	for _, bytes := range []int{4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprint(bytes), func(b *testing.B) { bench(b, "frames", bytes) })
	}
}

func bench(b *testing.B, name string, bytes int) {
	cfg := config(b, 2, 0)
	other := cfg
	other.Ranks = []int{1}
	start(b, "bench "+name, bytes, other)
	ends, err := shm.Open(background, cfg)
	if err != nil {
		b.Fatal(err)
	}
	call := benches[name](ends[0], bytes)
	b.SetBytes(int64(bytes))
	seq := uint64(0)
	for b.Loop() {
		if _, err := call(transport.Header{Seq: seq}); err != nil {
			b.Fatal(err)
		}
		seq++
	}
	_, err = call(transport.Header{Seq: seq, Root: 1})
	if err := errors.Join(err, ends[0].Close()); err != nil {
		b.Fatal(err)
	}
}
