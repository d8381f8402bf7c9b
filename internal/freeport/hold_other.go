//go:build !linux

package freeport

import "net"

// held are ports that were free.
type held struct{ first int }

func hold(n int) (held, bool) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return held{}, false
	}
	h := held{first: l.Addr().(*net.TCPAddr).Port}
	l.Close()
	return h, listenable(h.first, n)
}

func (h *held) release() {}
