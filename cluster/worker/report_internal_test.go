package worker

import (
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/timeline"
)

// TestPublished checks which steps of reports are published: each twice, also those of a second trainer, whose steps
// are numbered from 1 again.
func TestPublished(t *testing.T) {
	var p published
	report := func(steps ...timeline.Step) (numbers []int64, published bool) {
		r := timeline.Report{Steps: steps}
		published = p.add(&r)
		for _, s := range r.Steps {
			numbers = append(numbers, s.Step)
		}
		return numbers, published
	}
	if _, ok := report(); !ok {
		t.Error("the first report, without steps, is not published")
	}
	if _, ok := report(); ok {
		t.Error("a report without news is published")
	}
	var all []timeline.Step
	step := func(number int64) {
		all = append(all, timeline.Step{Step: number, End: time.Duration(len(all)+1) * time.Second})
	}
	for _, c := range []struct {
		numbers []int64
		want    int
	}{
		{[]int64{1, 2, 3}, 3}, {[]int64{4, 5}, 5}, {[]int64{6}, 3}, {[]int64{1, 2}, 3}, // and then a second trainer
		{[]int64{3, 4}, 4}, {[]int64{1, 2, 3, 4}, 6},
	} {
		for _, n := range c.numbers {
			step(n)
		}
		if got, ok := report(all...); len(got) != c.want || !ok {
			t.Errorf("after the steps %v: published %v (%v), want %d steps", c.numbers, got, ok, c.want)
		}
	}
}
