package distribute

import (
	"context"
	"sync"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/distribute/device"
)

// Default returns the strategy of code outside of all scopes: one replica on CPU:0, whose values are never
// wrapped and whose variables are plain (TensorFlow's default strategy). The process has one. It holds no
// resources while no Run is in progress.
func Default() *Strategy { return defaultStrategy().strategy }

// defaultStrategy makes the default strategy and the replica of code outside of a Run.
var defaultStrategy = sync.OnceValue(func() *Replica {
	s, err := (&Strategy{
		kind: defaultKind, oneDevice: true, task: cluster.NoTask,
		placement: placement{devices: []device.Spec{device.CPU(0)}, params: []device.Spec{device.CPU(0)}},
	}).open("Default")
	if err != nil {
		panic(err) // nothing can fail
	}
	r := &Replica{replicaState: newReplicaState(), strategy: s, home: s, device: &s.devices[0]}
	r.frame = frame{strategy: s, replica: r}
	r.ctx = stepContext{context.Background(), &r.frame}
	return r
})
