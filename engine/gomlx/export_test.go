package gomlx

import (
	"slices"

	"github.com/gomlx/compute"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Staged returns options for an engine that copies between host and device memory although it need not.
func Staged(o XLAOptions) XLAOptions {
	o.staged = true
	return o
}

// ComputeBackend returns the compute backend of an engine.
func ComputeBackend(e engine.Engine) compute.Backend { return e.(*backend).Backend }

// Versions returns the part of a description that lists the versions of the modules that compute.
var Versions = map[string]string{
	"github.com/gomlx/gomlx": gomlxVersion, "github.com/gomlx/compute": computeVersion,
	"github.com/gomlx/go-xla": goXLAVersion,
}

// LiveBytes returns the number of bytes of the parameters' copies that a program holds: old and new values, slots,
// gradients; and of everything else, such as batches.
func LiveBytes(p engine.Program) (values, pending, slots, gradients, others int) {
	q := p.(*program)
	bytes := func(list []compute.Buffer, keep func(v int) bool) (sum int) {
		for v, b := range list {
			if b == nil || !keep(v) {
				continue
			}
			shape, err := b.Shape()
			if err != nil {
				panic(err)
			}
			sum += int(shape.ByteSize())
		}
		return sum
	}
	parameter := func(v int) bool { return v < q.parameters }
	other := func(v int) bool { return v >= q.parameters }
	for _, d := range q.devices {
		values += bytes(d.values, parameter)
		slots += bytes(d.values, other)
		pending += bytes(d.pending, parameter) + bytes(d.spare, parameter)
		others += bytes(d.pending, other)
		for _, t := range d.lent {
			if t != nil {
				others += t.Memory().Bytes
			}
		}
	}
	for _, r := range q.replicas {
		gradients += bytes(r.gradients, parameter)
		all := func(int) bool { return true }
		others += bytes(r.averages, all) + bytes(r.pendingAverages, all) + bytes([]compute.Buffer{r.losses}, all)
		list := []*hostBuffer{r.weightSum, r.rng, r.examples, r.lossScale}
		for _, f := range r.shapes {
			list = slices.Concat(list, f.inputs, f.labels, []*hostBuffer{f.weights})
		}
		for _, b := range list {
			others += b.mem.Bytes
		}
		for _, list := range [][]*tensor.Tensor{r.staged, r.fetched} {
			for _, t := range list {
				if t != nil {
					others += t.Memory().Bytes
				}
			}
		}
	}
	return values, pending, slots, gradients, others
}

// Unshared returns an engine on the same backend whose host and devices share no memory.
func Unshared(e engine.Engine) engine.Engine {
	b := *e.(*backend)
	b.Backend = unshared{b.Backend}
	return &b
}

type unshared struct{ compute.Backend }

func (unshared) HasSharedBuffers() bool { return false }

// ChooseAmong is Choose for a machine with these plugins and devices.
var ChooseAmong = choose
