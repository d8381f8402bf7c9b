// Package simulate executes the plans of collectives in virtual time, on a described cluster. It answers questions
// such as: how long would this all-reduce take on 128 hosts with 8 ranks each, and which rank waits for which? The
// plans are the real ones, of package plan; no data is moved.
//
// # The model
//
// A host has one or more ranks, which access each other's memory if [Cluster.Memory] is set, and one network card.
// A frame between hosts takes the latency of [Cluster.Outside]. It occupies the card of its sender, the card of
// its receiver and, if the switch is oversubscribed, the switch, each for the time that its bytes take there. With
// [Cluster.MTU] these are also the bytes of the headers of TCP, IP and Ethernet. TestRealHosts compares the model with
// real calls between network namespaces.
// Frames that need the same card queue in order of arrival. A frame within a host takes the time of
// [Cluster.Inside], and so does a read from or a write to another rank's memory. Cards are full-duplex. A frame
// starts when both ends have reached their step: nothing is buffered. Combining a frame overlaps its transfer,
// except for the last segment. Ranks that outnumber the cores of their host compute proportionally slower; a
// straggler is slower by its own factor.
package simulate
