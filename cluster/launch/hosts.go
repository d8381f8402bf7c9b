package launch

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
)

// Host is a machine on which a node's agent is started.
type Host struct {
	Name    string // as ssh accepts it: "host", "user@host", an address
	Workers int
}

// ParseHosts parses a list of hosts in the format of Open MPI and Horovod:
// "host1:4,user@host2:4,[fd00::1]:2". A host without a number has perHost workers.
func ParseHosts(s string, perHost int) ([]Host, error) {
	var out []Host
	seen := map[string]bool{}
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		h := Host{Name: part, Workers: perHost}
		if i := strings.LastIndexByte(part, ':'); i >= 0 && (strings.Count(part, ":") == 1 || part[i-1] == ']') {
			n, err := strconv.Atoi(part[i+1:])
			if err != nil || n < 1 {
				return nil, fmt.Errorf("%q: %q is not a number of workers", part, part[i+1:])
			}
			h.Name, h.Workers = part[:i], n
		}
		h.Name = strings.TrimSuffix(strings.TrimPrefix(h.Name, "["), "]")
		switch {
		case h.Name == "" || strings.HasPrefix(h.Name, "-") || strings.ContainsAny(h.Name, " \t\"'"):
			return nil, fmt.Errorf("%q is not a host: want a list such as host1:4,host2:4", part)
		case seen[h.Name]:
			return nil, fmt.Errorf("%q is listed twice: give all its workers in one entry", h.Name)
		}
		seen[h.Name] = true
		out = append(out, h)
	}
	return out, nil
}

// local reports whether a host is this machine by its name.
func (h *Host) local() bool {
	if ip := net.ParseIP(h.Name); ip != nil {
		return ip.IsLoopback()
	}
	own, err := os.Hostname()
	return strings.EqualFold(h.Name, "localhost") || err == nil && strings.EqualFold(h.Name, own)
}
