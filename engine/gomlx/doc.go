// Package gomlx implements package engine with GoMLX. It compiles an ordinary GoMLX model function to an
// [engine.Program], and runs it on Lockstep's pure-Go backend or on XLA.
//
// A model function uses GoMLX's packages (ml/model, ml/layers, core/graph). The optimizer is one of
// ml/train/optimizer or of engine/gomlx/optimizer. Lockstep adds two things that data-parallel training needs
// and GoMLX's trainer lacks. Losses and metrics are per example, so that padded and uneven batches are
// weighted correctly. The step has two parts, so that gradients can be reduced between them.
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
// Compiled graphs own no variables: every value is an argument. So one compiled graph serves all replicas,
// and a step's new values are kept apart until Commit. Initial values are always drawn on the host by the
// pure-Go backend, so every engine starts from the same bits.
//
// A model function may communicate between replicas: [AllReduce] is a differentiable sum or mean over them,
// and layer.SyncBatchNorm normalises by the global batch.
//
// docs/engine.md lists surprising behaviours of GoMLX and how this package handles them.
package gomlx
