// Package fingerprint identifies a collective call to other ranks, so that ranks that make different calls are
// detected, and describes it in errors.
//
// Every frame and slot carries a [transport.Header]; the receiver compares it with the header of the call that
// it makes itself. [New] makes the header of a call from its [Params]. Only the fields that all ranks must
// agree on are part of it ([Agreed]); names and shapes are part of it as a hash. A [Call] adds what a header
// cannot hold: names, shapes and the algorithm, by which [Call.String] describes the call, and [Differ] the
// difference of two.
//
// The package is pure: it reads its arguments and returns values.
package fingerprint
