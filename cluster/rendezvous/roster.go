package rendezvous

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// roster is the content of the record by which the workers get the registrations of all. Most workers have the same
// registration as others, besides their number, process and port: it is stated once for each group.
type roster struct {
	// Groups has the registration of the first worker of each group, its address without the port.
	Groups []Registration `json:"groups"`
	// Members has, for each worker, its group, process id and port: [group, pid, port, group, pid, port, …].
	Members []int `json:"members"`
}

const memberNumbers = 3 // of each worker in Members

// withoutPort splits the port off an address; 0 if it has none.
func withoutPort(addr string) (host string, port int) {
	i := strings.LastIndexByte(addr, ':')
	n, err := strconv.Atoi(addr[i+1:])
	if i < 0 || err != nil || n < 1 || strconv.Itoa(n) != addr[i+1:] {
		return addr, 0
	}
	return addr[:i], n
}

// packRoster encodes registrations, which are in the order of their workers, for the outcome.
func packRoster(registrations []Registration) ([]byte, error) {
	groups := map[string]int{}
	var r roster
	for i := range registrations {
		c := registrations[i]
		var port int
		c.Addr, port = withoutPort(c.Addr)
		c.Worker, c.PID, c.Nonce = 0, 0, ""
		text, err := json.Marshal(&c)
		if err != nil {
			return nil, err
		}
		g, ok := groups[string(text)]
		if !ok {
			g = len(r.Groups)
			groups[string(text)] = g
			c.Worker, c.Nonce = registrations[i].Worker, registrations[i].Nonce
			r.Groups = append(r.Groups, c)
		}
		r.Members = append(r.Members, g, registrations[i].PID, port)
	}
	text, err := json.Marshal(&r)
	if err != nil {
		return nil, err
	}
	return pack(text), nil
}

// unpackRoster decodes what packRoster has encoded. Registrations of one group share their data.
func unpackRoster(packed []byte, workers int) ([]Registration, error) {
	text, err := unpack(packed)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: the roster: %w", err)
	}
	r, err := decodeRoster(text, workers)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: the roster: %w", err)
	}
	if len(r.Members) != memberNumbers*workers {
		return nil, fmt.Errorf("rendezvous: the roster has %d numbers, want %d for each of %d", len(r.Members), memberNumbers,
			workers)
	}
	for i := range r.Groups {
		c := &r.Groups[i]
		if err := c.check(); err != nil {
			return nil, err
		}
		if c.Workers != workers {
			return nil, fmt.Errorf("rendezvous: the roster of %d workers has %v, of %d", workers, c, c.Workers)
		}
	}
	out := make([]Registration, workers)
	for w := range out {
		m := r.Members[memberNumbers*w:]
		g, port := m[0], m[2]
		if g < 0 || g >= len(r.Groups) {
			return nil, fmt.Errorf("rendezvous: the roster has worker %d in group %d of %d", w, g, len(r.Groups))
		}
		out[w] = r.Groups[g]
		if out[w].Worker != w {
			out[w].Nonce = ""
		}
		out[w].Worker, out[w].PID = w, m[1]
		if port > 0 {
			out[w].Addr += ":" + strconv.Itoa(port)
		}
	}
	return out, nil
}

// decodeRoster decodes the roster of a number of workers. Its lists are counted before they are decoded, since empty
// elements take much more memory than text.
func decodeRoster(text []byte, workers int) (roster, error) {
	var raw struct {
		Groups  json.RawMessage `json:"groups"`
		Members json.RawMessage `json:"members"`
	}
	r := roster{Members: make([]int, 0, memberNumbers*workers)}
	if err := json.Unmarshal(text, &raw); err != nil {
		return r, err
	}
	if n := bytes.Count(raw.Members, []byte(",")) + 1; n != memberNumbers*workers {
		return r, fmt.Errorf("it has %d numbers, want %d for each of %d workers", n, memberNumbers, workers)
	}
	if err := json.Unmarshal(raw.Members, &r.Members); err != nil {
		return r, fmt.Errorf("its members: %w", err)
	}
	groups := json.NewDecoder(bytes.NewReader(raw.Groups))
	if start, err := groups.Token(); err != nil || start != json.Delim('[') {
		return r, fmt.Errorf("its groups are %.20q, want a list", raw.Groups)
	}
	for groups.More() {
		if len(r.Groups) == workers {
			return r, fmt.Errorf("it has more than %d groups, the number of workers", workers)
		}
		var c Registration
		if err := groups.Decode(&c); err != nil {
			return r, fmt.Errorf("group %d: %w", len(r.Groups), err)
		}
		r.Groups = append(r.Groups, c)
	}
	return r, nil
}
