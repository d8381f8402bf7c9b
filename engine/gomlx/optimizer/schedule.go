package optimizer

import (
	"fmt"
	"math"

	"github.com/gomlx/gomlx/core/graph"
)

// Schedule builds the learning rate of an update from the number of previous updates. Both are scalars of the
// same floating-point dtype. The first update has number 0. After every update, the rate is stored in
// "/optimizers/learning_rate".
type Schedule func(step *graph.Node) *graph.Node

// CosineDecay decreases the rate from initial to alpha·initial along half a cosine, over the given number of
// updates, and then keeps it constant. It is Keras' CosineDecay; GoMLX's cosineschedule restarts with the
// initial rate instead. It panics if steps is below 1.
func CosineDecay(initial float64, steps int, alpha float64) Schedule {
	if steps < 1 {
		panic(fmt.Sprintf("optimizer: CosineDecay over %d steps: want at least 1", steps))
	}
	return func(step *graph.Node) *graph.Node {
		progress := graph.DivScalar(graph.MinScalar(step, float64(steps)), float64(steps))
		cosine := graph.MulScalar(graph.OnePlus(graph.Cos(graph.MulScalar(progress, math.Pi))), 0.5)
		return graph.MulScalar(graph.AddScalar(graph.MulScalar(cosine, 1-alpha), alpha), initial)
	}
}
