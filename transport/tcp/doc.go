// Package tcp is a transport over TCP connections, for ranks of different processes on one or more hosts.
//
// A process opens a [Node], which has one listening port. [Node.Group] joins the ranks at the given addresses into a
// group and returns the endpoints of this process. Control connections join processes: all with each other up to 16,
// each with few others of more (package overlay), and any two that exchange frames or queries. They carry the rare
// messages: a rank has closed its end or has failed, queries about calls, requests for a connection. When one ends, the
// peer process is lost. Processes pass the news of that, and of a failed group, on to those that have no connection
// with it. Two ranks that exchange frames have a data connection, which is opened when the first frame needs it. A
// split group has separate data connections. The process of the higher ranks dials that of the lower.
//
// # Moving a frame
//
// The rank's goroutine writes and reads its sockets without blocking. Data moves from and to the caller's memory,
// except for small frames, which are received together with their header.
//
// On Linux the sockets are not registered with Go's poller. A rank that waits spins for a while if the host has at
// least as many processors as ranks, and sends meanwhile what other exchanges in progress have to send. Then its thread
// waits for the sockets in a system call, for milliseconds. If that did not suffice, and every 20 ms of such waits, it
// has an epoll instance of the endpoint report to Go's poller, and blocks in [transport.Park], which everything can end
// that ends a call. On other systems, and for connections that are not sockets, goroutines move the bytes through
// buffers. No call starts a goroutine or allocates.
//
// A send returns when the kernel has taken the frame, so a sender may be ahead of its receiver by the size of the
// socket buffers.
//
// # Refused connections
//
// docs/wire.md specifies the wire format. A connection must start with a hello of this version, job, epoch and group,
// from a rank that is not connected yet. Any other connection is refused with a reason, counted ([Node.Refused]) and
// logged, and does not affect the group. A length in received data never determines an allocation. Connections whose
// handshake is incomplete are bounded in number ([Config.HalfOpen]) and time ([Config.Handshake]). With [Config.TLS]
// all connections between hosts are encrypted and, if the TLS config requires it, mutually authenticated;
// [Config.Authenticate] can require another proof.
//
// # Lost peers
//
// When a process ends, for any reason, its connections close, and its peers notice at once. When a host vanishes, its
// peers notice on a control connection by [Config.KeepAlive]: by default after 15 seconds of silence. A stopped
// process is not lost; waits for it end at the caller's deadline.
package tcp
