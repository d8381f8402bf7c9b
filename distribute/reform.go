package distribute

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/undo"
)

// Placement says which worker of a job computes which replicas, and where this worker computes its own. The number of
// replicas of a job never changes.
type Placement struct {
	Worker   int      // this worker's number, from 0; 0 is the chief
	Replicas [][]int  // by worker, the ids of its replicas, ascending; each id of the job once
	Devices  []string // of this worker's replicas, in the order of their ids; a device may be there several times
	// Group holds the communicators of this worker's replicas, in the order of their ids, which are their ranks. The
	// strategy closes it. Nil: this worker has all replicas, and the strategy opens a group.
	Group collective.Group
}

// check returns an error unless each of size replicas has one worker.
func (p *Placement) check(size int) error {
	seen := make([]bool, size)
	for worker, ids := range p.Replicas {
		if len(ids) == 0 || !slices.IsSorted(ids) {
			return fmt.Errorf("worker %d has the replicas %v: want at least one, in ascending order", worker, ids)
		}
		for _, id := range ids {
			if id < 0 || id >= size || seen[id] {
				return fmt.Errorf("worker %d has replica %d, which does not exist or has a worker already: want each of the %d "+
					"replicas once", worker, id, size)
			}
			seen[id] = true
		}
	}
	if missing := slices.Index(seen, false); missing >= 0 {
		return fmt.Errorf("replica %d has no worker", missing)
	}
	if p.Worker < 0 || p.Worker >= len(p.Replicas) || len(p.Devices) != len(p.Replicas[p.Worker]) {
		return fmt.Errorf("this is worker %d of %d, with %d devices: want a device for each of its replicas", p.Worker,
			len(p.Replicas), len(p.Devices))
	}
	return nil
}

// Reform gives a MultiWorkerMirroredStrategy another placement of its replicas, between two Runs. It waits for no other
// worker; all workers of the placement call it, each with its part of the same one. It closes the communicators of the
// earlier placement. No other method of the strategy but Close may run meanwhile. After an error of communicators the
// strategy can only be closed; invalid placements change nothing.
//
// The variables given keep their values: a component of a replica that stays on this worker is kept. That of another
// replica gets the value of this worker's first component, until the caller sets it. Other variables can no longer be
// used. What a [Storage] holds is its own concern.
func (s *Strategy) Reform(p Placement, variables ...*Variable) error {
	const op = "Reform"
	if s.kind != multiWorkerKind {
		return errorf(op, ErrInvalid, "the replicas of %v stay where they are: want a MultiWorkerMirroredStrategy", s)
	}
	if err := s.requireOpen(op); err != nil {
		return err
	}
	if replica, inside := s.detector.Here(); inside {
		return located(errorf(op, ErrContext, "called inside a step function, on replica %d of %v: call it after the Run",
			replica, s))
	}
	if err := p.check(s.size); err != nil {
		return errorf(op, ErrInvalid, "%w", err)
	}
	known, err := knownDevices(op, s.engine, 0)
	if err != nil {
		return err
	}
	devices, err := canonicalDevices(op, p.Devices, known, true)
	if err != nil {
		return err
	}
	defer s.detector.Hold()()
	if err := s.requireOpen(op); err != nil {
		return err // closed meanwhile
	}
	before := s.placement
	s.placement = placement{
		devices: devices, params: devices, workersInSync: len(p.Replicas), workerID: p.Worker, chief: p.Worker == 0,
		replicasOf: p.Replicas,
	}
	if p.Group != nil && p.Group.Local()[0].Size() != s.size {
		err = errorf(op, ErrInvalid, "the group has %d ranks: want one for each of the %d replicas of the job",
			p.Group.Local()[0].Size(), s.size)
	} else if p.Group != nil {
		err = s.adoptGroup(op, p.Group)
	} else if len(p.Replicas) > 1 {
		err = errorf(op, ErrInvalid, "no group for %d workers: want the communicators of this worker's replicas",
			len(p.Replicas))
	}
	if err == nil && p.Group != nil && !slices.Equal(s.ids, p.Replicas[p.Worker]) {
		err = errorf(op, ErrInvalid, "the group has the ranks %v here, and the placement the replicas %v: want the same",
			s.ids, p.Replicas[p.Worker])
	}
	if err != nil {
		s.placement = before
		return err
	}
	after := s.placement
	s.placement = before
	if err := s.closePlacement(); err != nil { // its communicators may have failed
		s.logger.Debug("distribute: closing the communicators of an earlier placement", "error", err)
	}
	s.placement = after
	s.reforms++
	s.number()
	s.detector.Place(s.shortDevices(), s.ids)
	for _, v := range variables {
		v.reform(before.ids)
	}
	if err := s.openPlacement(op); err != nil {
		s.closed.Store(true)
		return err
	}
	return nil
}

// reformed implements groupOwner.
func (s *Strategy) reformed() bool { return s.elastic }

// reform gives the variable a component for each local replica; before are the ids of the earlier ones.
func (v *Variable) reform(before []int) {
	components := v.components
	v.devices, v.components, v.reforms = v.strategy.params, nil, v.strategy.reforms
	for i, d := range v.devices {
		at := slices.Index(before, v.strategy.ids[i])
		switch {
		case v.storage != nil:
			v.components = append(v.components, undo.NewCellIn(componentIn{v.storage, i}))
		case at >= 0:
			v.components = append(v.components, components[at])
		default:
			value, _ := components[0].Load() // only a storage can fail
			v.components = append(v.components, undo.NewCell(value.Clone().OnDevice(d.Index)))
		}
	}
}
