// Package mixed joins ranks by what there is: those of one process by memory, those of one host by shared memory, all
// others by TCP. Which one it is for a pair is found out when the group is made, and is the same on both sides.
//
// [Open] needs one thing from outside: that every process's card, a few hundred bytes that say where it is, reaches all
// others ([Config.Exchange]). A rendezvous does that between hosts. [InProcess] does it between the goroutines of a test,
// [Collect] and [Through] between a parent and the processes that it has started.
//
// The ranks that reach each other by memory are a domain: those of a host that has shared memory, else those of a process.
// A group that is one domain is returned as package mem's or shm's; one in which every rank is a domain of its own as
// package tcp's. Otherwise each end joins its domain's end and one of a TCP group of all ranks: marks, slots, stages and
// buffers are the domain's; frames go by TCP, those between ranks of one domain too, so that a wait has one place where it
// looks and blocks. Plans for several domains use memory inside and frames between them. That a rank is gone, has failed or is
// asked goes by TCP as well, whose control connections see everything.
package mixed
