package chooser

import (
	"os"
	"strings"
	"testing"
)

// TestEndlessFile reads a file that has 0 bytes according to the system, and no end.
func TestEndlessFile(t *testing.T) {
	const endless = "/dev/zero"
	if _, err := os.Stat(endless); err != nil {
		t.Skip(err)
	}
	if _, err := Load(endless); err == nil || !strings.Contains(err.Error(), "more than 1048576 bytes") {
		t.Errorf("got %v, want the size that a table has at most", err)
	}
}
