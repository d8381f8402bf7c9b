package freeport

import "syscall"

// held holds sockets that are bound to consecutive ports and do not listen.
type held struct {
	first   int
	sockets []int
}

// hold binds a socket to each of n consecutive ports, and only then sets SO_REUSEADDR. From then on Linux assigns these
// ports to no listener and no dialed connection that requests any port. A socket with SO_REUSEADDR can still bind to
// them explicitly, as net.Listen does.
func hold(n int) (held, bool) {
	h := held{}
	for range n {
		s, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			h.release()
			return h, false
		}
		at := syscall.SockaddrInet4{} // port 0: any
		if len(h.sockets) > 0 {
			at.Port = h.first + len(h.sockets)
		}
		h.sockets = append(h.sockets, s)
		err = syscall.Bind(s, &at)
		if err == nil {
			err = syscall.SetsockoptInt(s, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
		}
		if err == nil && h.first == 0 {
			var name syscall.Sockaddr
			if name, err = syscall.Getsockname(s); err == nil {
				h.first = name.(*syscall.SockaddrInet4).Port
			}
		}
		if err != nil {
			h.release()
			return h, false
		}
	}
	if !listenable(h.first, n) { // a Linux that is played by something else
		h.release()
		return h, listenable(h.first, n)
	}
	return h, true
}

func (h *held) release() {
	for _, s := range h.sockets {
		_ = syscall.Close(s)
	}
	h.sockets = nil
}
