package launch

import (
	"errors"
	"net"
)

// reserved are ports that are held open so that no other process gets them, until the workers need them.
type reserved struct{ listeners []net.Listener }

// reserve reserves n free ports at an address of this machine.
func reserve(address string, n int) (*reserved, error) {
	r := &reserved{}
	for range n {
		l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
		if err != nil {
			return nil, errors.Join(err, r.release())
		}
		r.listeners = append(r.listeners, l)
	}
	return r, nil
}

func (r *reserved) numbers() []int {
	var out []int
	for _, l := range r.listeners {
		out = append(out, l.Addr().(*net.TCPAddr).Port)
	}
	return out
}

// release closes the ports. Calling it again does nothing.
func (r *reserved) release() (err error) {
	for _, l := range r.listeners {
		err = errors.Join(err, l.Close())
	}
	r.listeners = nil
	return err
}
