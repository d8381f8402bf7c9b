// Package simulate carries out the plans of collectives in virtual time, on a cluster that is only described: how long
// would this all-reduce take on 128 hosts with 8 ranks each, and who waits for whom? The plans are the real ones, of
// package plan; no byte is moved.
//
// # The model
//
// A host has ranks, which reach each other's memory if [Cluster.Memory] says so, and one network card. A frame between hosts
// takes [Cluster.Outside].Latency, and occupies the card of its sender, the card of its receiver and, if the switch is
// oversubscribed, the switch, each for as long as its bytes take there; frames that want the same card queue in the order in
// which they come. A frame within a host takes [Cluster.Inside], and so does what a rank reads from or writes to another's
// memory. Cards send and receive at once. A frame starts when both ends have come to their step: nothing is buffered.
// Combining what arrives overlaps its arrival but for the last segment. Ranks that outnumber their host's cores compute
// slower by that much; a straggler by its own factor.
package simulate
