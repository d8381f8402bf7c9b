// Package transport moves bytes between the ranks of a group, and says when a peer is gone. It knows ranks, frames
// and memory, and nothing of what the bytes mean.
//
// An [Endpoint] is one rank's end of a group. It reaches each peer in one of two ways: by messages ([Endpoint.Exchange])
// or, where the peer's memory can be read and written (same process, shared memory), by published slots
// ([Endpoint.Publish], [Endpoint.Peer]) and the marks that order the accesses. Every frame and every slot carries a
// [Header], which the receiver holds against its own current call before it touches the data.
package transport
