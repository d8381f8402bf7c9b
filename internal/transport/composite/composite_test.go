package composite_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
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
