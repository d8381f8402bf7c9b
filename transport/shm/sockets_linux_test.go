package shm_test

import (
	"testing"

	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

// TestFrames runs the conformance suite without shared memory.
func TestFrames(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	transporttest.Run(t, transporttest.Transport{
		Open:    func(t *testing.T, n int) []transport.Endpoint { return open(t, shm.OpenFrames, n, 2) },
		Buffers: true,
	})
}
