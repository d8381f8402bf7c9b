// Package mixed joins ranks by the fastest transport that reaches each pair: memory within a process, shared memory
// within a host, TCP otherwise. The transport of each pair is chosen when the group is created, and is the same on both
// sides.
//
// The processes must know each other's addresses and settings. With a rendezvous a process first calls [Listen],
// registers with its [Listener.Addr] and [Listener.Settings], and then calls [Listener.Connect] with those of all.
// [Open] does all at once: the caller passes the registration of every process, a few hundred bytes, to all others
// ([Config.Exchange]), such as by [Collect] and [Through] between a parent and the processes that it has started.
//
// The ranks that reach each other by memory are a domain: those of a host that has shared memory, or else those of a
// process. If a group is one domain, Open returns endpoints of package mem or shm. If every rank is a separate domain,
// it returns endpoints of package tcp. Otherwise each endpoint combines that of its domain with one of a TCP group of
// all ranks. Flags, slots, staging buffers and memory buffers are those of the domain. All frames use TCP, also within
// a domain, so that a wait has one place to poll and block. Plans for several domains use memory inside a domain and
// frames between domains. Down, Fail and Ask use TCP too, because its messages reach all ranks.
package mixed
