package collective

import (
	"context"
	"errors"
	"strings"
	"testing"
)

func TestErrorText(t *testing.T) {
	cause := errors.New("it broke")
	for _, test := range []struct {
		err  *Error
		want string
	}{
		{&Error{Kind: ErrClosed, Comm: "world", Rank: 1}, `collective: communicator "world", rank 1: communicator closed`},
		{
			&Error{Kind: ErrAborted, Comm: "world", Rank: -1, Err: cause}, `collective: communicator "world": aborted: it broke`,
		},
		{
			&Error{Kind: ErrTimeout, Comm: "world", Rank: 2, Op: AllReduce, Seq: 7, Name: "w", Err: cause},
			`collective: communicator "world", rank 2, call 7, all_reduce of "w": deadline exceeded: it broke`,
		},
	} {
		if got := test.err.Error(); got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
		if !errors.Is(test.err, test.err.Kind) || test.err.Err != nil && !errors.Is(test.err, cause) {
			t.Errorf("%v does not match its kind and cause", test.err)
		}
		if timeout := test.err.Kind == ErrTimeout; errors.Is(test.err, context.DeadlineExceeded) != timeout ||
			test.err.Timeout() != timeout {
			t.Errorf("%v is a deadline: want %v", test.err, timeout)
		}
	}
}

func TestParseReduceOp(t *testing.T) {
	for r := Sum; r <= Prod; r++ {
		if got, err := ParseReduceOp(strings.ToLower(r.String())); err != nil || got != r {
			t.Errorf("%v became %v, %v", r, got, err)
		}
	}
	if _, err := ParseReduceOp("MEDIAN"); err == nil || !strings.Contains(err.Error(), `"MEDIAN" is not a reduction`) {
		t.Errorf("MEDIAN: %v", err)
	}
}

func TestConfig(t *testing.T) {
	got, err := Config{}.filled()
	if err != nil || got.Name != "world" || got.Timeout != defaultTimeout || got.Stall != defaultStall ||
		got.Order != Canonical ||
		got.Accumulate != AccumulateDType || got.Logger == nil {
		t.Errorf("the zero Config became %+v, %v", got, err)
	}
	for says, c := range map[string]Config{
		`no algorithm "magic"`:        {Algorithm: "magic"},
		"unknown order 7":             {Order: 7},
		"unknown accumulation type 7": {Accumulate: 7},
		`configuration of "train"`:    {Name: "train", Order: 7},
	} {
		if _, err := Open(nil, c); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want %q", c, err, says)
		}
	}
	if _, err := Open(nil, Config{}); err == nil {
		t.Error("Open without endpoints: no error")
	}
}
