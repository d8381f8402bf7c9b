// Package elementwise runs many element-by-element operations in one pass over memory. A [Program] is a list of such
// operations between inputs, numbers and outputs; [Run] executes programs block by block, so that each input is read
// once and each output written once, while intermediate values stay in the processor's caches. The loops over a block
// are those of internal/kernel.
//
// Every operation rounds its results to their type, as if it were applied to whole vectors: no two operations are
// fused into one rounding. So results have the same bits as those of the Go backend, whatever the size of the blocks,
// the number of goroutines, and the processor; only the payloads of NaNs may differ.
package elementwise
