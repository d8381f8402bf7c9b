//go:build !linux

package listener

import "net/netip"

// userOf returns false: the system does not report it.
func userOf(netip.AddrPort, netip.AddrPort) (user int, ok bool) { return 0, false }
