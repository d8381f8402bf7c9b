package composite_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/internal/transport/composite"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	for name, virtual := range map[string]bool{"real time": false, "virtual time": true} {
		t.Run(name, func(t *testing.T) {
			transporttest.Run(t, transporttest.Transport{
				Open: func(_ *testing.T, n int) []transport.Endpoint {
					return transporttest.Domains(n, transporttest.Pairs)
				},
				Domain: transporttest.Pairs, Virtual: virtual,
			})
		})
	}
}

// TestNoInlineMemory checks that a joined endpoint declares no memory beside slots, even if both endpoints have some.
func TestNoInlineMemory(t *testing.T) {
	places := []transport.Place{{}, {}, {Worker: 1, Domain: 1, Host: 1}}
	near, far := mem.New(2), mem.New(3)
	e := composite.NewGroup(places).Join(0, near[0], far[0])
	if n, own := e.Capabilities().InlineBytes, e.Memory().Inline(0); n != 0 || own != nil {
		t.Errorf("declares %d bytes beside a slot and has %d", n, len(own))
	}
	for _, end := range []transport.Endpoint{e, near[1], far[1], far[2]} {
		if err := end.Close(); err != nil {
			t.Error(err)
		}
	}
}
