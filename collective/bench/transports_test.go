package bench

import (
	"context"
	"io"
	"net"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mixed"
)

// TestEncrypted: with TLS all connections between the processes are encrypted, though they are on one host; without it,
// none is.
func TestEncrypted(t *testing.T) {
	for _, encrypted := range []bool{true, false} {
		const n = 3
		key := secret.New().Text()
		links := make([]io.ReadWriter, n)
		ends := make([][]transport.Endpoint, n)
		errs := make(chan error, n)
		for i := range n {
			parent, child := net.Pipe()
			defer parent.Close()
			links[i] = parent
			j := &job{Options{Ranks: n, Processes: n, TLS: encrypted}, i, "test", key}
			go func() {
				var err error
				ends[i], err = joinTCP(context.Background(), j, child)
				errs <- err
			}()
		}
		if err := mixed.Collect(links); err != nil {
			t.Fatal(err)
		}
		for range n {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		for i, e := range ends {
			with := e[0].Capabilities().Encrypted
			for peer := range n {
				if got := with != nil && with[peer]; peer != i && got != encrypted {
					t.Errorf("TLS %v: the connection of ranks %d and %d is encrypted: %v", encrypted, i, peer, got)
				}
			}
			e[0].Close()
		}
	}
}
