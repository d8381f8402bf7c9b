package cluster

import (
	"cmp"
	"maps"
)

// Union is a resolver for the union of several clusters (TensorFlow's UnionResolver). Jobs of one name are
// joined: dense ones one after the other in the order of the resolvers, sparse ones by their indices, which
// must not overlap. All other methods use the first resolver, except for the values set here.
type Union struct {
	Resolvers []Resolver
	This      Task   // overrides the first resolver's; an empty type, and an index of 0 or less, do not, as in TensorFlow
	Layer     string // overrides the first resolver's
}

var _ Resolver = (*Union)(nil)

// NewUnion returns a union of resolvers. At least one is required.
func NewUnion(resolvers ...Resolver) (*Union, error) {
	if len(resolvers) == 0 {
		return nil, errorf("a union of no resolvers: at least one is required")
	}
	for i, r := range resolvers {
		if r == nil {
			return nil, errorf("resolver %d of the union is nil", i)
		}
	}
	return &Union{Resolvers: resolvers}, nil
}

// Spec returns the joined spec.
func (u *Union) Spec() (Spec, error) {
	specs := make([]Spec, len(u.Resolvers))
	sparse := map[string]bool{}
	for i, r := range u.Resolvers {
		var err error
		if specs[i], err = r.Spec(); err != nil {
			return nil, err
		}
		for job := range specs[i] {
			sparse[job] = sparse[job] || !specs[i].Dense(job)
		}
	}
	out := Spec{}
	for _, s := range specs {
		for job, tasks := range s {
			if out[job] == nil {
				out[job] = map[int]string{}
			}
			if !sparse[job] {
				base := len(out[job])
				for index, address := range tasks {
					out[job][base+index] = address
				}
				continue
			}
			for _, index := range s.Indices(job) {
				if _, twice := out[job][index]; twice {
					return nil, errorf("duplicate keys detected when merging two cluster specs: task %d of job '%s' is in both", index,
						job)
				}
			}
			maps.Copy(out[job], tasks)
		}
	}
	return out, nil
}

// Task returns the first resolver's task, with the values set here.
func (u *Union) Task() (Task, error) {
	t, err := u.Resolvers[0].Task()
	t.Type = cmp.Or(u.This.Type, t.Type)
	if u.This.Index > 0 {
		t.Index = u.This.Index
	}
	return t, err
}

// Master returns the address of the given task in the joined spec, or, if the task is not fully known, the
// first resolver's master.
func (u *Union) Master(of Task, layer string) (string, error) {
	if !of.Known() {
		return u.Resolvers[0].Master(NoTask, layer)
	}
	spec, err := u.Spec()
	if err != nil {
		return "", err
	}
	address, err := spec.Address(of)
	if err != nil {
		return "", err
	}
	return masterURL(address, cmp.Or(layer, u.Layer)), nil
}

// Accelerators returns the first resolver's.
func (u *Union) Accelerators() (map[string]int, error) { return u.Resolvers[0].Accelerators() }

// Environment returns the first resolver's.
func (u *Union) Environment() string { return u.Resolvers[0].Environment() }

// RPCLayer returns the one set here, else the first resolver's.
func (u *Union) RPCLayer() (string, error) {
	if u.Layer != "" {
		return u.Layer, nil
	}
	return u.Resolvers[0].RPCLayer()
}
