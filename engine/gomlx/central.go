package gomlx

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"
)

// central manages the only copy of every variable. The values are those of the replica on the central device.
// Replicas on other devices copy a variable on read if it has changed.
type central struct {
	replica  int // that computes new values
	device   compute.DeviceNum
	versions []uint64 // by variable: how often it was written
}

// openCentral selects the replica that keeps the variables, if Spec.Central is set.
func (p *program) openCentral() error {
	d := p.spec.Central
	if d == nil {
		return nil
	}
	if n := p.spec.Replicas; n > len(p.spec.Devices) {
		return fmt.Errorf("gomlx: Spec.Central is set for %d replicas of which %d are local: want all replicas in one "+
			"process",
			n, len(p.spec.Devices))
	}
	device, err := p.backend.deviceNum(*d)
	if err != nil {
		return fmt.Errorf("%w: variables can be kept only on the device of a replica", err)
	}
	var nums []compute.DeviceNum
	for _, d := range p.spec.Devices {
		n, err := p.backend.deviceNum(d)
		if err != nil {
			return err
		}
		nums = append(nums, n)
	}
	replica := slices.Index(nums, device)
	if replica < 0 {
		return fmt.Errorf("gomlx: variables cannot be kept on %s:%d, where no replica computes: want the device of a replica",
			d.Kind, d.Index)
	}
	p.central = &central{replica: replica, device: device, versions: make([]uint64, len(p.variables))}
	return nil
}

// Central implements [engine.Central].
func (p *program) Central() bool { return p.central != nil }

// changed records that a variable has a new value.
func (c *central) changed(variable int) {
	if c != nil {
		c.versions[variable]++
	}
}

// value returns a variable's value on the device of r. Several replicas may call it concurrently, but not
// while a value is written.
func (c *central) value(r *replica, variable int) (compute.Buffer, error) {
	own := r.p.replicas[c.replica].values[variable]
	if r.device == c.device {
		return own, nil
	}
	if r.copied == nil {
		r.copied = make([]uint64, len(c.versions))
	}
	if r.values[variable] != nil && r.copied[variable] == c.versions[variable] {
		return r.values[variable], nil
	}
	v := r.p.variables[variable]
	host, err := toHost(own)
	if err != nil {
		return nil, fmt.Errorf("copy variable %s: %w", v.Name, err)
	}
	b, err := r.p.backend.BufferFromFlatData(r.device, flatOf(host.Memory(), v.shape.DType, host.Len()), v.shape)
	if err != nil {
		return nil, fmt.Errorf("copy variable %s: %w", v.Name, err)
	}
	release(r.values[variable])
	r.values[variable], r.copied[variable] = b, c.versions[variable]
	return b, nil
}
