// Package gomlx is the engine behind Lockstep: it turns an ordinary GoMLX model function into the programs that
// [engine.Program] describes, and runs them on GoMLX's pure-Go backend or on XLA.
//
// A model function is written with GoMLX's own packages (ml/model, ml/layers, core/graph); the optimizer is one of
// ml/train/optimizer or of engine/gomlx/optimizer. Lockstep adds what data-parallel training needs and GoMLX's trainer does not have: losses and
// metrics per example, so that padded and uneven batches count right, and the step in two halves, so that gradients
// can be reduced between them.
//
//	m := &gomlx.Model{
//		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
//			x := activation.Relu(layers.Dense(s.In("hidden"), in[0], true, 64))
//			return []*graph.Node{layers.Dense(s.In("readout"), x, true, 10)}
//		},
//		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
//		Optimizer: optimizer.Adam().Done(),
//		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
//	}
//	e, err := gomlx.OpenGo(gomlx.GoOptions{})
//	program, err := m.Compile(ctx, e, spec)
//
// In functional form a program owns no variable: every value is an argument, so one compiled graph serves all
// replicas, and a step's new values stay aside until Commit. Initial values are drawn on the host by the pure-Go
// backend whatever the engine is, so every engine starts from the same bits.
//
// A model function may look at all replicas: [AllReduce] is a differentiable sum or mean over them, and
// layer.SyncBatchNorm normalises by the global batch.
//
// What of GoMLX behaves in a way that surprises is listed in docs/engine.md, each with what is done about it.
package gomlx
