package layers

import (
	"context"
	"iter"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// The contracts between the packages. Compiling this file tests them: interfaces may grow, but not change.
var (
	_ = tensor.Memory{Ptr: unsafe.Pointer(nil), Bytes: 0, Kind: tensor.Host, Device: 0, Owner: tensor.Owner(nil)}
	_ = [...]tensor.MemoryKind{tensor.Host, tensor.Shared, tensor.Device}
	_ interface {
		Retain()
		Release()
	} = tensor.Owner(nil)

	_ = collective.Call{
		Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32, Src: tensor.Memory{}, Dst: tensor.Memory{},
		Counts: []int(nil), Root: 0, Manifest: (*collective.Manifest)(nil), Options: (*collective.Options)(nil),
	}
	_ interface {
		Rank() int
		Size() int
		Do(context.Context, *collective.Call) error
		Start(context.Context, *collective.Call) (collective.Handle, error)
		Split(ctx context.Context, color, key int) (collective.Communicator, error)
		Abort(error)
		Err() error
		Properties() collective.Properties
		Close() error
	} = collective.Communicator(nil)
	_ interface {
		Local() []collective.Communicator
		DoAll(context.Context, []collective.Call) error
		Rebuild(context.Context) (collective.Group, error)
	} = collective.Group(nil)
	_ = collective.Algorithm{
		Name:  "",
		Fits:  (func(collective.Problem) error)(nil),
		Steps: (func(p collective.Problem, rank int) iter.Seq[collective.Step])(nil),
		Cost:  (func(collective.Problem, collective.Links) time.Duration)(nil),
	}

	_ interface {
		Capabilities() transport.Capabilities
		Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error
		Posts() transport.Poster
		Memory() transport.SharedMemory
		Inspect(func(peer int, h transport.Header) error)
		Down() <-chan transport.PeerDown
		Close() error
	} = transport.Endpoint(nil)
	_ interface {
		Publish(*transport.Slot)
		Peer(int) *transport.Slot
		Retire(tensor.Memory)
	} = transport.SharedMemory(nil)
	_ = transport.Capabilities{
		Places: []transport.Place(nil), StagingBytes: 0, SharedReceives: false,
		Encrypted: []bool(nil),
	}

	_ func(context.Context, *distribute.Strategy, func(context.Context, *distribute.Replica, int) (string, error),
		distribute.PerReplica[int]) (distribute.PerReplica[string], error) = distribute.Run[int, string]
	_ func(context.Context, *distribute.Replica,
		func(context.Context, *distribute.CrossReplica, distribute.PerReplica[int]) (string, error),
		int) (string, error) = distribute.MergeCall[int, string]
	_ func(context.Context, *distribute.Strategy, distribute.ReduceOp, distribute.PerReplica[float32],
		distribute.ReduceOptions) (float32, error) = distribute.Reduce[float32]
	_ func(context.Context, *distribute.Replica, distribute.ReduceOp, float32,
		...distribute.Options) (float32, error) = distribute.AllReduce[float32]
	_ func(v *distribute.Variable, in distribute.Context, x distribute.Value) error = (*distribute.Variable).Assign
	_                                                                               = [...]distribute.Context{
		(*distribute.Replica)(nil), (*distribute.CrossReplica)(nil),
	}
	_ = distribute.Options{
		BytesPerPack: 0, Timeout: time.Duration(0), Implementation: distribute.ImplementationAuto,
		Order: collective.Canonical, Accumulate: collective.AccumulateDType,
	}

	_ interface {
		Buckets() []engine.Bucket
		Gradients(ctx context.Context, replica int, m engine.Micro, ready func(bucket int)) (engine.Scalars, error)
		Gradient(replica, parameter int) (*tensor.Tensor, error)
		Parts(device int) [][]int
		Update(ctx context.Context, device, replica, part int, factor float64) error
		Updated(device, parameter int) (*tensor.Tensor, error)
		Pieces() []engine.Piece
		Kept(replica, variable int) (from, to int)
		Place(replicaDevices, replicaShards []int) error
		Commit()
		Discard()
	} = engine.Program(nil)

	_ interface {
		Iter(context.Context) iter.Seq2[data.Element, error]
		Len() int
	} = data.Dataset(nil)
)
