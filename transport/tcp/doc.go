// Package tcp connects ranks of different processes, on one host or many, by TCP connections.
//
// A process opens a [Node]: one listening port for everything. [Node.Group] joins the ranks that live at the given
// addresses into a group and returns the ends of this process's own. Between every two processes there is one control
// connection, from the beginning, which carries what is rare: that a rank has closed its end or has failed, questions about
// its call, the wish for a connection. Its end is how a process's death is noticed. Between two ranks that exchange frames
// there are data connections ([Config.Streams] of them), made when the first frame needs them; groups that are split off
// have their own. The process of the higher ranks dials that of the lower.
//
// # Moving a frame
//
// The rank's own goroutine writes and reads its sockets, without blocking; data goes from and to the caller's memory, but
// for small frames, which are copied behind their header. What the socket does not take is the connection's writer
// goroutine's to finish. A rank that has nothing to do looks again for a while if no more ranks than processors are on the
// host, and then has the connections watched and blocks in [transport.Park]. No call starts a goroutine or allocates.
//
// A send returns when the kernel has taken the frame, so a rank may be ahead of its receiver by what the sockets hold.
//
// # What is refused
//
// The wire format is in docs/wire.md. A connection must begin with a greeting of this version, job, epoch and group, from a
// rank that has none yet; anything else is refused with a reason, counted ([Node.Refused]) and logged, and disturbs nobody.
// Nothing that arrives makes the receiver allocate what it claims. Connections that have not greeted yet are bounded in number
// ([Config.HalfOpen]) and time ([Config.Handshake]). With [Config.TLS] all connections between hosts are encrypted and, if it
// says so, mutually authenticated; [Config.Authenticate] can ask for another proof.
//
// # When a peer is gone
//
// A process that ends, however it ends, is noticed at once by its closed connections. A host that vanishes is noticed on the
// control connection, by [Config.KeepAlive]: by default after 15 seconds of silence. A process that is stopped is not gone; what waits for it
// ends at the caller's deadline.
package tcp
