// Package listener implements the single listening port of a process, and the handshake of every connection: a hello
// that names the service, a proof that the dialer belongs to the job, and TLS.
//
// A process opens a [Listener] and registers its services ([Listener.Serve]). A client uses a [Dialer]. docs/wire.md
// specifies the messages.
//
// # Unauthenticated connections
//
// Any host can connect. A connection that sends no hello costs as little as possible. On Linux the kernel delivers a
// connection only after data has arrived on it. The goroutine that accepts reads the first bytes without blocking,
// recognizes data that is not a hello, and closes the connection. Only a connection whose hello is for a service and
// job of this process, or is incomplete, gets a goroutine. Its time ([Config.Handshake]) and the number of them
// ([Config.HalfOpen]) are bounded. Refusals are counted, and logged at most once a second for each reason.
package listener
