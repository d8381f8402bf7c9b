// Package door is a process's one listening port, and how every connection begins there: with a greeting that says which service
// is meant, a proof that the one who dials belongs to the job, and TLS.
//
// A process opens a [Listener] and has services take the connections that are for them ([Listener.Serve]). The one who dials uses a [Dialer]. What
// both say is in docs/wire.md.
//
// # Strangers
//
// Anybody can knock. Who does not greet is to cost as little as possible: on Linux the kernel shows a connection only when
// something has come through it, and what is no greeting is known by its first bytes, read without waiting, and closed by the
// goroutine that has accepted it. Only who has greeted this service and job, or may yet, gets a goroutine, and only so long
// ([Config.Handshake]) and so many at a time ([Config.HalfOpen]). Refusals are counted, and of each kind logged once a second.
package listener
