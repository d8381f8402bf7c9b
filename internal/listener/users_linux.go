package listener

import (
	"encoding/binary"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// The layout of sock_diag messages (linux/inet_diag.h): after the header of netlink, a request has the family, the
// protocol, two bytes, the states, and the identity of a socket: own port, other port, own address, other address,
// interface, cookie. An answer has the family, the state, two bytes, the identity, three numbers, and the user.
const (
	diagByFamily  = 20 // SOCK_DIAG_BY_FAMILY
	diagIdentity  = 48
	diagRequest   = unix.NLMSG_HDRLEN + 8 + diagIdentity
	diagUser      = unix.NLMSG_HDRLEN + 4 + diagIdentity + 12
	established   = 1
	diagTimeout   = 100 * time.Millisecond // the kernel answers within the call
	diagNoCookie  = 0xffffffff
	diagAllStates = 0xffffffff
)

// userOf returns the user of the other end of a connection between two sockets of this host; ok is false if the system
// does not report it.
func userOf(peer, own netip.AddrPort) (user int, ok bool) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	wait := unix.NsecToTimeval(diagTimeout.Nanoseconds())
	if unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait) != nil ||
		unix.Sendto(fd, socketRequest(peer, own), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) != nil {
		return 0, false
	}
	var answer [1 << 10]byte
	n, _, err := unix.Recvfrom(fd, answer[:], 0)
	if err != nil || n < diagUser+4 || binary.NativeEndian.Uint16(answer[4:]) != diagByFamily ||
		answer[unix.NLMSG_HDRLEN+1] != established {
		return 0, false
	}
	return int(binary.NativeEndian.Uint32(answer[diagUser:])), true
}

// socketRequest returns the request for the socket with these two addresses.
func socketRequest(own, other netip.AddrPort) []byte {
	b := make([]byte, diagRequest)
	binary.NativeEndian.PutUint32(b, diagRequest)
	binary.NativeEndian.PutUint16(b[4:], diagByFamily)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST)
	request := b[unix.NLMSG_HDRLEN:]
	request[0], request[1] = unix.AF_INET, unix.IPPROTO_TCP
	if own.Addr().Is6() {
		request[0] = unix.AF_INET6
	}
	binary.NativeEndian.PutUint32(request[4:], diagAllStates)
	identity := request[8:]
	binary.BigEndian.PutUint16(identity, own.Port())
	binary.BigEndian.PutUint16(identity[2:], other.Port())
	copy(identity[4:20], own.Addr().AsSlice())
	copy(identity[20:36], other.Addr().AsSlice())
	binary.NativeEndian.PutUint32(identity[40:], diagNoCookie)
	binary.NativeEndian.PutUint32(identity[44:], diagNoCookie)
	return b
}
