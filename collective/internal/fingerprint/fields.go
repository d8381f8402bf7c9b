package fingerprint

import "github.com/lockstep-ml/lockstep/collective/plan"

// Fields is a set of the parts of a call that all ranks must agree on.
type Fields uint16

// The parts of a call.
const (
	Reduce Fields = 1 << iota
	Type
	Root
	Count  // elements of the whole vector
	Counts // of each rank, if they are given
	Name
	Shape // of the ranks' tensors
	Order // of the reduction, and its accumulation type
	Algorithm
)

// agreed lists the fields that must agree, by operation. A field that need not agree, or has no meaning, is 0
// in the headers. The epoch, the communicator, the number of the call and the operation always must agree
// (Send and Recv match each other). The length of a rank's own memory is not compared; the count of the whole
// vector and the Counts are. Shapes are compared where every rank contributes, or receives, a tensor of the
// same shape.
var agreed = [...]Fields{
	plan.AllReduce:     Reduce | Type | Count | Name | Shape | Order | Algorithm,
	plan.Broadcast:     Type | Root | Count | Name | Shape | Algorithm,
	plan.Barrier:       Name | Algorithm,
	plan.Reduce:        Reduce | Type | Root | Count | Name | Shape | Order | Algorithm,
	plan.ReduceScatter: Reduce | Type | Count | Counts | Name | Order | Algorithm,
	plan.AllGather:     Type | Count | Counts | Name | Algorithm,
	plan.Gather:        Type | Root | Count | Counts | Name | Algorithm,
	plan.Scatter:       Type | Root | Count | Counts | Name | Algorithm,
	plan.AllToAll:      Type | Count | Name | Shape | Algorithm,
	plan.Send:          Type | Count | Name | Shape,
	plan.Recv:          Type | Count | Name | Shape,
}

// Agreed returns the fields that all ranks must agree on in an operation; none if the operation is unknown.
func Agreed(op plan.Op) Fields {
	if int(op) < len(agreed) {
		return agreed[op]
	}
	return 0
}

// Has reports whether a field is in the set.
func (f Fields) Has(field Fields) bool { return f&field != 0 }
