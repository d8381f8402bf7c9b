package distribute

import (
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// Component is one of a variable's components, as an update function sees it: the component of a replica, or the one
// that all replicas share. It is the [Context] in which [Variable.Read], [Variable.Assign] and the other methods of its
// variable read and write this component alone, until its update ends.
type Component struct {
	variable *Variable
	index    int
	update   *update
}

// update is one call of Update.
type update struct {
	run  *deadlock.Run // that the call is part of, or nil
	over atomic.Bool
}

// Variable returns the component's variable (TensorFlow's value container).
func (c *Component) Variable() *Variable { return c.variable }

func (c *Component) partOf() (whole Value, index, parts int) {
	return c.variable, c.index, len(c.variable.components)
}

// Replica returns the index of the component's replica on this worker, or 0 for a component that all replicas
// share.
func (c *Component) Replica() int { return c.index }

// Strategy returns the strategy that the variable belongs to.
func (c *Component) Strategy() *Strategy { return c.variable.strategy }

func (*Component) sealed() {}

// Device returns the component's device in TensorFlow's full form.
func (c *Component) Device() string {
	return c.variable.strategy.deviceName(c.variable.devices[c.index])
}

// of returns an error unless the component is one of v.
func (c *Component) of(op string, v *Variable) error {
	if c.variable != v {
		return errorf(op, ErrContext, "the component is one of variable %s: it cannot be used with %s", c.variable.Name(),
			v.Name())
	}
	return nil
}
