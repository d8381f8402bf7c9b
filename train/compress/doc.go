// Package compress exchanges gradients in fewer bytes, for replicas that are joined by slow links.
//
// A [Codec] says how. [Codec.New] makes an [Exchange] for every replica and group of parameters (a bucket): it encodes
// the replica's gradients, describes the collective calls that transfer them, and decodes what arrives to the sum over
// all replicas. It makes no call itself: package train does, and so encoding and transfers overlap.
//
//	for _, calls := range x.Start(gradients, step) {
//		… // make the calls and wait for them
//		x.Next()
//	}
//	… // gradients now hold the sums of all replicas
//	x.Commit() // or x.Discard(), if the step is not taken
//
// All replicas decode the same bytes in the same order. So they end with equal bits, whatever the number of processes,
// although those are not the bits of an uncompressed sum.
//
// # Methods
//
// [BFloat16] and [Float16] halve the bytes: gradients are rounded to nearest even, summed along the canonical tree, and
// widened again. A node of the tree adds in float32 and rounds to the type; with collective.AccumulateFloat32 in the
// strategy's options only the whole sum is rounded, but partial sums between hosts then take four bytes. bfloat16 has
// the range of float32. In float16 a gradient above 65504 becomes an infinity, which the check of train.NotFinitePolicy
// reports, and one below 3e-8 becomes 0.
//
// [Int8] transfers about a quarter: blocks of 256 elements of a tensor as 8-bit integers with one float32 scale. Each
// replica gets its part of all gradients from all replicas, adds them in the order of the replicas in float32, encodes
// the sums again, and all replicas gather them.
//
// [PowerSGD] transfers much less: each matrix M as a product P Qᵀ of rank r (Vogels, Karimireddy, Jaggi, "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization", 2019). A tensor of more dimensions is a matrix
// with the last dimension as columns. Vectors, and matrices for which this saves less than half, are transferred as
// they are, in the same call.
//
// # Error feedback
//
// What Int8 and PowerSGD round away is not lost: each replica keeps it, and adds it to its gradients of the next step
// (Seide and others, "1-Bit Stochastic Gradient Descent", 2014; Karimireddy and others, "Error Feedback Fixes SignSGD",
// 2019). Int8 rounds twice, as 1-bit Adam and DoubleSqueeze do (Tang and others, 2019 and 2021). Those keep a second
// residual for the second rounding; here the replica that made the sums adds their error to its own residual, because
// only the sum of all residuals matters. The residual belongs to the step: it changes when the step is committed. It is
// part of snapshots ([Exchange.State]).
//
// Gradients of other types than float32 are transferred as they are.
package compress
