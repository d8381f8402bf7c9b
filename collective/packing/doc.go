// Package packing all-reduces many tensors with few collective calls: it joins tensors into packs (TensorFlow's
// packs, DDP's buckets) and makes one call for each pack, which reads and writes the tensors where they are.
//
// A call has a latency, whatever its size, so a model's many small gradients should be transferred together.
// But the optimizer can apply a gradient as soon as it is reduced, so they should not all be transferred in
// one call. A [Pack] is the compromise: packs are reduced one after the other, and the caller can wait for
// each of them.
//
// [Plan] makes the packs as TensorFlow does: it reverses the tensors (a backward pass computes the last
// layer's gradients first), groups them by [GroupBySize], and then, where TensorFlow fails, splits groups by
// dtype. [Costs.BytesPerPack] computes a size if the caller gives none. A [Reducer] is made once for a list
// of tensors and reduces it repeatedly, without allocating.
//
//	r, err := packing.NewReducer(comm, tensors, packing.Config{BytesPerPack: 50 << 20})
//	…
//	err = r.Start(ctx, dst, src) // all packs
//	for i, p := range r.Packs() {
//		err := r.Wait(ctx, i)
//		… // dst[t] is complete for the t of p.Tensors, while later packs are still being reduced
//	}
//
// Packs do not change results: the elements of each tensor are added along the same tree as without packs, so
// their bits are the same for every pack size.
package packing
