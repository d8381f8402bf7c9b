package distribute

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
)

// NewMultiWorkerMirroredStrategy returns a strategy that keeps variables equal on the devices of all workers
// (TensorFlow's MultiWorkerMirroredStrategy). Every worker makes one, and all workers make the same calls in
// the same order. With several workers these calls wait for the other workers, as replicas' calls do: this
// function, the creation of variables, reductions and gathers in cross-replica context, reads of sync-on-read
// variables there, and the steps of a distributed dataset.
//
// Replica ids run over all workers. Distributed values and variables hold the components of this worker's
// replicas. With several workers a value that is not distributed, passed to a reduction or a gather in
// cross-replica context, is one value per worker: it counts once for each worker, whatever its number of
// replicas. There is one exception: if some workers have one replica and others several, it counts for every
// replica of its worker and has no sum, because it cannot be distinguished from a value of a worker's only
// replica.
func NewMultiWorkerMirroredStrategy(cfg MultiWorkerConfig) (*Strategy, error) {
	const op = "NewMultiWorkerMirroredStrategy"
	known, err := knownDevices(op, cfg.Engine, cfg.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	if err := cfg.Options.validate(); err != nil { // before joining
		return nil, err
	}
	p, job, err := cfg.place(op)
	if err != nil {
		return nil, err
	}
	devices, err := canonicalDevices(op, devicesOr(cfg.Devices, known, 1), known, true)
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		placement: placement{
			devices: devices, params: devices, workersInSync: p.workers, workerID: p.id, chief: p.chief,
		},
		kind: multiWorkerKind, engine: cfg.Engine, resolver: cfg.Resolver, task: p.task, size: len(devices),
		options: cfg.Options, stall: cfg.Stall, logger: cfg.Logger, elastic: cfg.Elastic,
	}
	if cfg.Worker == nil && cfg.Group == nil && p.workers > 1 {
		if cfg.Worker, err = cfg.join(op, job, len(devices)); err != nil {
			return nil, err
		}
		s.joined = true
	}
	if s.member = cfg.Worker; s.member != nil && p.workers > 1 {
		cfg.Group = s.member.Group()
	}
	made, err := s.openWith(op, cfg.Group)
	if err != nil {
		s.leaveJob(err)
	}
	return made, err
}

// openWith opens the strategy over the group that it was given, if any.
func (s *Strategy) openWith(op string, group collective.Group) (*Strategy, error) {
	if group != nil {
		if err := s.adoptGroup(op, group); err != nil {
			return nil, err
		}
	}
	s, err := s.open(op)
	if err != nil || s.workersInSync == 1 {
		return s, err
	}
	// Before comparing options: a worker that waits in the store is not notified of another's failure.
	err = s.joinWorkers(op)
	if err == nil {
		err = s.compareOptions(op)
	}
	if err != nil {
		s.leaveJob(err)
		s.group.owner = nil // the caller keeps ownership
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// leaveJob leaves the job that the strategy has joined, because of err.
func (s *Strategy) leaveJob(err error) {
	if s.joined {
		_ = s.member.Fail(err) // the caller gets err, whether or not the others can be notified
		_ = s.member.Close()
	}
}

// adoptGroup validates and sets the group between the replicas.
func (s *Strategy) adoptGroup(op string, g collective.Group) error {
	local := g.Local()
	if len(local) != len(s.devices) {
		return errorf(op, ErrInvalid, "the group has %d communicators here for %d devices: want one each", len(local),
			len(s.devices))
	}
	s.userGroup, s.size = g, local[0].Size()
	if single := s.size == len(s.devices); single != (s.workersInSync == 1) {
		return errorf(op, ErrInvalid, "the cluster has %d workers, and the group has %d communicators here, of %d in all: "+
			"want a group of exactly these workers", s.workersInSync, len(local), s.size)
	}
	for _, c := range local {
		s.ids = append(s.ids, c.Rank())
	}
	if !slices.IsSorted(s.ids) {
		return errorf(op, ErrInvalid, "the group's communicators here are ranks %v: want ascending ranks", s.ids)
	}
	return nil
}

// compareOptions checks through the store, if there is one, that all workers have the same options. Timeouts
// may differ.
func (s *Strategy) compareOptions(op string) error {
	if s.member == nil {
		return nil // the first reduction reports a difference
	}
	o, order, accumulate := s.options, "Canonical", "AccumulateDType" // the defaults
	if o.Order == collective.Any {
		order = "Any"
	}
	if o.Accumulate == collective.AccumulateFloat32 {
		accumulate = "AccumulateFloat32"
	}
	err := s.member.Compare(context.Background(), "options of the strategy", []rendezvous.Fact{
		{Name: "BytesPerPack", Value: fmt.Sprint(o.BytesPerPack)},
		{Name: "Implementation", Value: fmt.Sprint(o.Implementation)},
		{Name: "Order", Value: order},
		{Name: "Sparse", Value: fmt.Sprint(o.Sparse)},
		{Name: "Accumulate", Value: accumulate},
	})
	if errors.Is(err, clusterworker.ErrDiffer) {
		return errorf(op, ErrMismatch, "%w", err)
	}
	if err != nil {
		return errorf(op, nil, "%w", err)
	}
	return nil
}

// joinWorkers waits until all workers have joined. Every rank sends its worker's id and the number of workers,
// and checks that these are consistent.
func (s *Strategy) joinWorkers(op string) error {
	mine := make([][]int64, len(s.devices))
	for i := range mine {
		mine[i] = []int64{int64(s.workerID), int64(s.workersInSync)}
	}
	all, err := s.collective.exchange(context.Background(), "workers of the job", mine, s.options)
	if err != nil {
		return errorf(op, nil, "joining the other workers: %w", err)
	}
	s.replicasOf = make([][]int, s.workersInSync)
	for rank, is := range all {
		switch id, count := is[0], is[1]; {
		case count != int64(s.workersInSync):
			return errorf(op, ErrMismatch, "replica %d belongs to a cluster of %d workers, those of this worker to one of %d: "+
				"want one cluster spec on all of them", rank, count, s.workersInSync)
		case id < 0 || id >= count:
			return errorf(op, ErrMismatch, "replica %d is of worker %d: want one of %d workers", rank, id, count)
		default:
			s.replicasOf[id] = append(s.replicasOf[id], rank)
		}
	}
	if missing := slices.IndexFunc(s.replicasOf, func(ids []int) bool { return len(ids) == 0 }); missing >= 0 {
		return errorf(op, ErrMismatch, "worker %d of %d has no replica in the group", missing, s.workersInSync)
	}
	if ids := s.replicasOf[s.workerID]; !slices.Equal(ids, s.ids) {
		return errorf(op, ErrMismatch, "two processes joined as worker %d: it has the replicas %v here and %v in the group",
			s.workerID, s.ids, ids)
	}
	return nil
}
