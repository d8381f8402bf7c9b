package distribute

import (
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/distribute/device"
)

// Properties has TensorFlow's properties of a strategy (StrategyExtended's).
type Properties struct {
	ShouldCheckpoint    bool     // this worker writes checkpoints
	ShouldSaveSummary   bool     // this worker writes summaries
	ShouldInit          bool     // this worker initialises variables
	BetweenGraph        bool     // each worker runs its own program
	RequireStaticShapes bool     // all batches must have one shape
	InMultiWorkerMode   bool     // there is more than one worker
	NumReplicasInSync   int      // number of replicas of all workers
	WorkerDevices       []string // of this worker's replicas
	ParameterDevices    []string // where variables live
	InputDevice         string   // where this worker's input pipeline runs
	DefaultDevice       string   // set by a scope; empty: none, as with one worker

	ClusterResolver cluster.Resolver // that the strategy was made with, or nil
}

// Properties returns TensorFlow's properties of a strategy of this kind (StrategyExtended's properties).
func (s *Strategy) Properties() Properties {
	p := Properties{
		ShouldCheckpoint: s.chief, ShouldSaveSummary: s.chief, ShouldInit: true,
		BetweenGraph:      s.kind == centralKind || s.kind == multiWorkerKind,
		InMultiWorkerMode: s.workersInSync > 1,
		NumReplicasInSync: s.size, WorkerDevices: s.Devices(), ParameterDevices: s.deviceNames(s.params),
		InputDevice: s.deviceName(device.CPU(0)), ClusterResolver: s.resolver,
	}
	if p.InMultiWorkerMode {
		p.DefaultDevice = device.Spec{Job: s.task.Type, Replica: 0, Task: s.task.Index, Index: -1}.String()
	}
	return p
}

// ReadStats sets out to the times so far. Those of a Run in progress may be counted in part. It uses the memory of
// out.Replicas again.
func (s *Strategy) ReadStats(out *Stats) {
	out.Runs, out.Elapsed = int(s.stats.runs.Load()), time.Duration(s.stats.elapsed.Load())
	out.Replicas = out.Replicas[:0]
	for i := range s.stats.replicas {
		r := &s.stats.replicas[i]
		out.Replicas = append(out.Replicas, ReplicaStats{
			Step: time.Duration(r.stepTime.Load()), Reduce: time.Duration(r.reduceTime.Load()),
			Wait: time.Duration(r.waitTime.Load()), Calls: r.calls.Load(),
		})
	}
}
