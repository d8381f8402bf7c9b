// Package packing moves many tensors as few: it joins them to packs, and carries out one collective call for each.
//
// A call costs a latency, whatever its size, so a model's many small gradients want to travel together. But what is done
// with a gradient, its application, can begin when it has arrived, so they do not want to travel all at once. A [Pack]
// is the compromise: packs travel one behind the other, and each can be awaited by itself.
//
// [Plan] makes the packs as TensorFlow does: the tensors are reversed (a backward pass finds the last layer's gradients
// first), grouped by [GroupBySize], and then, where TensorFlow fails, cut by dtype. [Costs.BytesPerPack] finds a
// size for those who name none. A [Reducer] is made once for a list of tensors and reduces it over and over, without
// allocating.
//
//	r, err := packing.NewReducer(comm, tensors, packing.Config{BytesPerPack: 50 << 20})
//	…
//	err = r.Start(ctx, dst, src) // all packs
//	for i, p := range r.Packs() {
//		err := r.Wait(ctx, i)
//		… // dst[t] for the t of p.Tensors are there, while later packs travel
//	}
//
// Packs change no result: the elements of each tensor are added along the same tree as without them, so their bits are the
// same for every size of pack.
package packing
