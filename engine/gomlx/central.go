package gomlx

import (
	"fmt"

	"github.com/gomlx/compute"
)

// openCentral selects the device that keeps the variables, if Spec.Central is set. Replicas on other devices
// copy a variable on read if it has changed.
func (p *program) openCentral() error {
	at := p.spec.Central
	if at == nil {
		return nil
	}
	if n, local := p.spec.Replicas, p.spec.LocalReplicas(); n > local {
		return fmt.Errorf("gomlx: Spec.Central is set for %d replicas of which %d are local: want all replicas in one "+
			"process", n, local)
	}
	num, err := p.backend.deviceNum(*at)
	if err != nil {
		return fmt.Errorf("%w: variables can be kept only on the device of a replica", err)
	}
	for _, d := range p.devices {
		if d.num == num {
			p.central = d
			return nil
		}
	}
	return fmt.Errorf("gomlx: variables cannot be kept on %s:%d, where no replica computes: want the device of a replica",
		at.Kind, at.Index)
}

// keepsAverages reports whether a step's changes of averages by r are committed to the central copy. They are
// those of the first replica of the central device: all replicas compute the same ones.
func (p *program) keepsAverages(r *replica) bool {
	return p.central != nil && r.device == p.central && r.first
}

// copyCentral returns the central value of a variable on the device d. The caller holds the turn of d.
func (d *device) copyCentral(v int) (compute.Buffer, error) {
	c := d.p.central
	own, err := c.value(v)
	if err != nil || d.num == c.num {
		return own, err
	}
	if d.values[v] != nil && d.copied[v] == c.versions[v] {
		return d.values[v], nil
	}
	host, err := toHost(own)
	if err != nil {
		return nil, fmt.Errorf("gomlx: copy variable %s: %w", d.p.variables[v].Name, err)
	}
	b, err := d.upload(v, host)
	if err != nil {
		return nil, err
	}
	release(d.values[v])
	d.values[v], d.copied[v] = b, c.versions[v]
	return b, nil
}
