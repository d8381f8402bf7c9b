package gomlx

import (
	"fmt"
	"unsafe"

	"github.com/gomlx/compute"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/elementwise"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
	"github.com/lockstep-ml/lockstep/tensor"
)

// On the Go engine, the optimizer's update is a few passes over memory, one for each variable with its slots: package
// elementwise executes the operations that GoMLX has recorded. The backend executes what is left, such as the learning
// rate. The results have the same bits.

// fuseUpdates lets the update programs compute parameters and slots by passes over memory.
func (p *program) fuseUpdates() {
	for _, x := range p.allUpdates() {
		x.fuses = make([]bool, len(x.changed))
		for i, v := range x.changed {
			x.fuses[i] = p.variables[v].Role != engine.Average // replicas keep them
		}
		x.scales = make([]bool, len(x.args))
		for i, a := range x.args {
			t := p.variables[a.index].DType
			x.scales[i] = a.kind == gradientArg && (t == tensor.Float32 || t == tensor.Float64)
		}
	}
}

// fuse takes what passes over memory compute out of a recorded graph.
func (x *executable) fuse(d *stages.Deferred) {
	found := d.Fuse(func(result int) bool { return x.fuses[result] },
		func(parameter int) bool { return x.scales[parameter] })
	if len(found.Programs) > 0 {
		x.fusion = found
	}
}

// fusedChanges lists the variables whose new values passes over memory compute.
func (x *executable) fusedChanges() (list []int) {
	if x.fusion != nil {
		for _, f := range x.fusion.Programs {
			for _, i := range f.Results {
				list = append(list, x.changed[i])
			}
		}
	}
	return list
}

// restChanges lists the variables whose new values the backend computes, in the order of its results.
func (x *executable) restChanges() (list []int) {
	for _, i := range x.fusion.Rest {
		list = append(list, x.changed[i])
	}
	return list
}

// multipliesInMemory reports whether the gradient of a parameter has to be multiplied in its memory: passes over memory
// multiply by themselves.
func (x *executable) multipliesInMemory(parameter int) bool {
	for i, a := range x.args {
		if a.kind == gradientArg && a.index == parameter {
			return x.fusion == nil || !x.scales[i] || x.fusion.Needs[i]
		}
	}
	return false
}

// argument returns the variable of which an argument of a program has the device's values, or the gradient.
func (d *device) argument(a argument) variable {
	if a.kind == variableArg {
		return d.variables[a.index]
	}
	return d.p.variables[a.index]
}

// runFused computes new values of parameters and slots by passes over memory. The arguments of x are those of its last
// run by r, and out its results, of which runFused frees those that are numbers.
func (d *device) runFused(r *replica, x *executable, out []compute.Buffer, factor float64) error {
	defer func() {
		for _, b := range out[len(x.fusion.Rest):] {
			release(b)
		}
	}()
	d.turn.Lock()
	defer d.turn.Unlock()
	jobs := make([]elementwise.Job, len(x.fusion.Programs))
	for k, f := range x.fusion.Programs {
		j := &jobs[k]
		j.Program, j.N = f.Program, f.Size
		j.In, j.Out = make([]unsafe.Pointer, len(f.Inputs)), make([]unsafe.Pointer, len(f.Results))
		j.Numbers = make([]elementwise.Number, len(f.Numbers))
		for i, in := range f.Inputs {
			v := d.argument(x.args[in.Parameter])
			t, err := viewOf(r.args[in.Parameter], v.Variable, v.shape, d.num)
			if err != nil {
				return err
			}
			j.In[i] = unsafe.Add(t.Memory().Ptr, in.From*v.DType.Bytes())
		}
		for i := range f.Numbers {
			n, err := &f.Numbers[i], error(nil)
			switch n.Source {
			case stages.ConstantNumber:
				j.Numbers[i] = n.Constant
			case stages.ParameterNumber:
				err = n.Load(&j.Numbers[i], r.args[n.Index])
			case stages.ResultNumber:
				err = n.Load(&j.Numbers[i], out[n.Index])
			case stages.FactorNumber:
				n.Set(&j.Numbers[i], 1)
				if !x.fusion.Needs[n.Index] {
					n.Set(&j.Numbers[i], factor)
				}
			}
			if err != nil {
				return err
			}
		}
		for i, result := range f.Results {
			v := x.changed[result]
			of := d.variables[v]
			if err := d.keptMemory(v); err != nil {
				return fmt.Errorf("memory for the new value of %s: %w", of.Name, err)
			}
			t, err := viewOf(d.pending[v], of.Variable, of.shape, d.num)
			if err != nil {
				return err
			}
			if x.share != nil && v == x.share.Parameter {
				t = x.part(t)
			}
			j.Out[i] = t.Memory().Ptr
		}
	}
	d.p.backend.fused.Run(jobs)
	return nil
}
