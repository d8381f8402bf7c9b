package dataparallel

import (
	"fmt"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// Optimizer returns an optimizer that updates by the mean of the workers' gradients. o must have the method
// UpdateGraphWithGradients, as GoMLX's SGD, Adam, AdamW, Adamax and RMSProp have. Optimizer also averages over the
// workers what layers change in a step, such as the moving averages of batch normalization.
//
// The mean of the gradients is that of all examples if the workers' batches have as many; GoMLX's losses are
// means over a batch.
func (j *Job) Optimizer(o optimizer.Interface) optimizer.Interface { return &averaging{o, j} }

type averaging struct {
	optimizer.Interface
	job *Job
}

// UpdateGraph implements optimizer.Interface.
func (o *averaging) UpdateGraph(scope *model.Scope, _ *graph.Graph, loss *graph.Node) {
	if !loss.Shape().IsScalar() {
		panic(fmt.Errorf("dataparallel: the loss has the shape %s: want a scalar", loss.Shape()))
	}
	o.UpdateGraphWithGradients(scope, scope.BuildTrainableVariablesGradientsGraph(loss), loss.DType())
}

// UpdateGraphWithGradients implements train.OptimizeWithGradients, with which train.Trainer accumulates gradients.
func (o *averaging) UpdateGraphWithGradients(scope *model.Scope, gradients []*graph.Node, loss dtypes.DType) {
	inner, ok := o.Interface.(train.OptimizeWithGradients)
	if !ok {
		panic(fmt.Errorf("dataparallel: optimizer %T cannot apply given gradients: it has no method "+
			"UpdateGraphWithGradients", o.Interface))
	}
	if len(gradients) == 0 {
		panic(fmt.Errorf("dataparallel: the model has no trainable variable"))
	}
	mean := make([]*graph.Node, len(gradients))
	for i, x := range gradients {
		mean[i] = o.job.mean(x)
	}
	g := gradients[0].Graph()
	for v := range scope.IterVariables() {
		if !v.Trainable && v.DType().IsFloat() && v.InUseByGraph(g) && v.ChangedInGraph(g) {
			v.SetNodeValue(o.job.mean(v.NodeValue(g)))
		}
	}
	inner.UpdateGraphWithGradients(scope, mean, loss)
}

// mean returns the mean of x over the workers.
func (j *Job) mean(x *graph.Node) *graph.Node {
	if j.Size() == 1 {
		return x
	}
	return graph.DivScalar(j.AllReduce(x), float64(j.Size()))
}
