package optimizer

import (
	"fmt"
	"math"

	"github.com/gomlx/gomlx/core/graph"
)

// Schedule builds the learning rate of an update from the number of updates before it, both scalars of the same
// floating-point type. The first update is number 0. The rate is stored in "/optimizers/learning_rate" after every
// update.
type Schedule func(step *graph.Node) *graph.Node

// CosineDecay lowers the rate from initial to alpha·initial along half a cosine, over so many updates, and then keeps
// it there. It is Keras' CosineDecay. GoMLX's cosineschedule begins again with the initial rate instead.
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
