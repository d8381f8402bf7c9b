package bench_test

import (
	"bytes"
	"context"
	"regexp"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/collective/bench"
)

func TestPlain(t *testing.T) {
	for _, transport := range []string{"mem", "pipe"} {
		var out bytes.Buffer
		err := bench.Run(context.Background(), &out, bench.Options{Transport: transport, Ranks: 3, Sizes: []int{4, 4096}})
		want := regexp.MustCompile(`^lockstep-` + transport + ` ranks=3 bytes=4 us=[0-9]+\.[0-9]\nlockstep-` + transport + ` ranks=3 bytes=4096 us=[0-9]+\.[0-9]\n$`)
		if err != nil || !want.MatchString(out.String()) {
			t.Errorf("%v, printed:\n%swant lines like %s", err, out.String(), want)
		}
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	err := bench.Run(context.Background(), &out, bench.Options{Sizes: []int{1 << 20}, Format: "table", Algorithm: "recursive_doubling"})
	if lines := strings.Split(out.String(), "\n"); err != nil || len(lines) != 3 || !strings.Contains(lines[0], "median us") || !strings.Contains(lines[1], "1048576") {
		t.Errorf("%v, printed:\n%s", err, out.String())
	}
}

func TestWrongOptions(t *testing.T) {
	for _, test := range []struct {
		opts bench.Options
		says string
	}{
		{bench.Options{Transport: "pigeon"}, `no transport "pigeon": want mem or pipe`},
		{bench.Options{Ranks: -1}, "-1 ranks"},
		{bench.Options{Sizes: []int{5}}, "size 5: want a multiple of 4"},
		{bench.Options{Format: "poem"}, `no format "poem": want plain or table`},
		{bench.Options{Sizes: []int{4}, Algorithm: "magic"}, `no algorithm "magic"`},
	} {
		var out bytes.Buffer
		if err := bench.Run(context.Background(), &out, test.opts); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%+v: %v, want %q", test.opts, err, test.says)
		}
	}
}

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := bench.Run(ctx, &bytes.Buffer{}, bench.Options{Sizes: []int{4}}); err == nil {
		t.Error("a run with a context that is over printed results")
	}
}
