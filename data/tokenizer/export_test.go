package tokenizer

import (
	"testing"
	"time"
)

// SetMatchMax sets the longest time for a match of expressions that are compiled from now on, until the test ends.
func SetMatchMax(t testing.TB, d time.Duration) {
	before := matchMax
	matchMax = d
	t.Cleanup(func() { matchMax = before })
}
