package data

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime/debug"
)

// prefetch is Prefetch.
type prefetch struct {
	src Dataset
	n   int
}

// Len implements [Dataset].
func (p *prefetch) Len() int { return p.src.Len() }

type result struct {
	e   Element
	err error
}

// Iter implements [Dataset]. The loop always waits for its goroutine to end.
func (p *prefetch) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		inner, cancel := context.WithCancel(ctx)
		ready := make(chan result, p.n-1) // the goroutine holds one more
		go produce(inner, p.src, ready)
		defer func() {
			cancel()
			for range ready { // closed when the goroutine has ended
			}
		}()
		for {
			var r result
			var more bool
			select {
			case r, more = <-ready:
			case <-ctx.Done():
			}
			if !more && ctx.Err() != nil { // the goroutine may have ended for the same reason
				r, more = result{err: context.Cause(ctx)}, true
			}
			if !more || !yield(r.e, r.err) || r.err != nil {
				return
			}
		}
	}
}

// produce sends the elements of src until src or ctx ends, then closes ready.
func produce(ctx context.Context, src Dataset, ready chan<- result) {
	defer close(ready)
	send := func(r result) bool {
		select {
		case ready <- r:
			return true
		case <-ctx.Done():
			return false
		}
	}
	returned := false
	defer func() {
		if v := recover(); v != nil {
			send(result{err: panicError(v, debug.Stack())})
		} else if !returned {
			send(result{err: errors.New("data: the pipeline called runtime.Goexit")})
		}
	}()
	for e, err := range src.Iter(ctx) {
		if !send(result{e, err}) {
			break
		}
	}
	returned = true
}

// panicError wraps the panic value if it is an error, for errors.Is and errors.As.
func panicError(v any, stack []byte) error {
	if err, ok := v.(error); ok {
		return fmt.Errorf("data: panic in the pipeline: %w\n\n%s", err, stack)
	}
	return fmt.Errorf("data: panic in the pipeline: %v\n\n%s", v, stack)
}
