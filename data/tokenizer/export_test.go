package tokenizer

import (
	"testing"
	"time"
)

// SetTextMax sets the longest time for a short text, with expressions that are compiled from now on, until the test
// ends.
func SetTextMax(t testing.TB, d time.Duration) {
	before := textMax
	textMax = d
	t.Cleanup(func() { textMax = before })
}
