package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// RouteTo returns the address of the local interface that packets to an endpoint use. The endpoint is
// "host:port" or its URL. Listen on this address: then every process that can reach the endpoint can reach
// this process, and no others can. Nothing is sent.
//
// On the endpoint's own host this is the address by which other hosts reach it. There, a host's name often
// resolves to a loopback address (in /etc/hosts); RouteTo then returns the address of the interface of the
// default route. "localhost" and literal loopback addresses are used unchanged.
func RouteTo(ctx context.Context, endpoint string) (netip.Addr, error) {
	if _, rest, found := strings.Cut(endpoint, "://"); found {
		endpoint, _, _ = strings.Cut(rest, "/")
		endpoint, _, _ = strings.Cut(endpoint, ",") // etcd's first
	}
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil || host == "" {
		return netip.Addr{}, fmt.Errorf("rendezvous: the route to %q: want host:port", endpoint)
	}
	addr, err := sourceFor(ctx, net.JoinHostPort(host, port))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("rendezvous: the route to %s: %w", endpoint, err)
	}
	if _, literal := netip.ParseAddr(host); addr.IsLoopback() && literal != nil && !strings.EqualFold(host, "localhost") {
		outward, err := outward(ctx)
		if err != nil {
			return netip.Addr{}, fmt.Errorf("rendezvous: %s resolves to a loopback address on this host, and its address for "+
				"other hosts is unknown: %w; use its address instead of its name", host, err)
		}
		return outward, nil
	}
	return addr, nil
}

// sourceFor queries the kernel for the source address of packets to an endpoint.
func sourceFor(ctx context.Context, endpoint string) (netip.Addr, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "udp", endpoint)
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	local, err := netip.ParseAddrPort(c.LocalAddr().String())
	return local.Addr().Unmap(), err
}

// outward returns the address of the interface of the default route or, without one, the only non-loopback
// address.
func outward(ctx context.Context) (netip.Addr, error) {
	for _, documentation := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} { // RFC 5737, RFC 3849: unassigned
		if addr, err := sourceFor(ctx, documentation); err == nil && !addr.IsLoopback() {
			return addr, nil
		}
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return netip.Addr{}, err
	}
	var found []netip.Addr
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() && !p.Addr().IsLoopback() {
			found = append(found, p.Addr())
		}
	}
	slices.SortFunc(found, netip.Addr.Compare)
	switch len(found) {
	case 0:
		return netip.Addr{}, errors.New("it has no other address")
	case 1:
		return found[0], nil
	}
	return netip.Addr{}, fmt.Errorf("it has no default route, and several addresses: %v", found)
}
