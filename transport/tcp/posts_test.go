package tcp

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// TestSentAmongPosts checks that a rank that waits only for its frame to be sent is woken when it is sent, although the
// next ones cannot be sent: their receiver may wait for something that this rank must do first.
func TestSentAmongPosts(t *testing.T) {
	_, ends := pair(t, Config{})
	works(t, ends) // so both are connected
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	const posts, large = 3, 16 << 20 // more than sockets hold
	size := func(from, i int) int {
		if from == 1 && i == 0 {
			return 1 // it arrives at once, followed by the head of the next frame
		}
		return large
	}
	for rank := 1; rank >= 0; rank-- {
		ends[rank].Inspect(func(int, transport.Header) error { return nil })
		for i := range posts {
			if err := ends[rank].Posts().Post(1-rank, transport.Frame{Data: make([]byte, size(rank, i))}, 1-rank,
				make([]byte, size(1-rank, i))); err != nil {
				t.Fatal(err)
			}
		}
	}
	complete := func(e *endpoint) (err error) {
		for range posts {
			err = errors.Join(err, e.Posts().Complete(ctx))
		}
		return err
	}
	done := make(chan error, 1)
	go func() { done <- complete(ends[0]) }()
	for !ends[0].parked.Load() {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond) // now it has checked whose frames have arrived
	if err := errors.Join(complete(ends[1]), <-done); err != nil {
		t.Error(err)
	}
	for _, e := range ends {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
