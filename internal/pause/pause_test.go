package pause

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reason := errors.New("the job ends")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(3*time.Second, func() { cancel(reason) })
		for _, c := range []struct {
			d, took time.Duration
			want    error
		}{
			{2 * time.Second, 2 * time.Second, nil},
			{2 * time.Second, time.Second, reason},
			{time.Hour, 0, reason},
		} {
			start := time.Now()
			if err := For(ctx, c.d); err != c.want || time.Since(start) != c.took {
				t.Errorf("%v: %v after %v, want %v after %v", c.d, err, time.Since(start), c.want, c.took)
			}
		}
	})
}
