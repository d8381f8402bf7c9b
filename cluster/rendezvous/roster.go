package rendezvous

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// roster is the content of the record by which the workers get the registrations of all. Most workers have the same
// registration as others, besides their number and process: it is stated once for each group.
type roster struct {
	// Groups has the registration of the first worker of each group.
	Groups []Registration `json:"groups"`
	// Members has, for each worker, its group and process id: [group, pid, group, pid, …].
	Members []int `json:"members"`
}

// packRoster encodes registrations, which are in the order of their workers, for the outcome. It returns nil if they
// are too long for a record.
func packRoster(registrations []Registration) ([]byte, error) {
	groups := map[string]int{}
	var r roster
	for i := range registrations {
		c := registrations[i]
		c.Worker, c.PID, c.Nonce = 0, 0, ""
		text, err := json.Marshal(&c)
		if err != nil {
			return nil, err
		}
		g, ok := groups[string(text)]
		if !ok {
			g = len(r.Groups)
			groups[string(text)] = g
			r.Groups = append(r.Groups, registrations[i])
		}
		r.Members = append(r.Members, g, registrations[i].PID)
	}
	text, err := json.Marshal(&r)
	if err != nil {
		return nil, err
	}
	packed := pack([][]byte{text})
	if len(packed) == countBytes {
		return nil, nil
	}
	return packed, nil
}

// unpackRoster decodes what packRoster has encoded. Registrations of one group share their data.
func unpackRoster(packed []byte, workers int) ([]Registration, error) {
	texts, err := unpack(packed, 1)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: the roster: %w", err)
	}
	if texts == nil {
		return nil, fmt.Errorf("rendezvous: the roster is empty")
	}
	r, err := decodeRoster(texts[0], workers)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: the roster: %w", err)
	}
	if len(r.Members) != 2*workers {
		return nil, fmt.Errorf("rendezvous: the roster has %d numbers, want 2 for each of %d", len(r.Members), workers)
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
		g := r.Members[2*w]
		if g < 0 || g >= len(r.Groups) {
			return nil, fmt.Errorf("rendezvous: the roster has worker %d in group %d of %d", w, g, len(r.Groups))
		}
		out[w] = r.Groups[g]
		if out[w].Worker != w {
			out[w].Nonce = ""
		}
		out[w].Worker, out[w].PID = w, r.Members[2*w+1]
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
	r := roster{Members: make([]int, 0, 2*workers)}
	if err := json.Unmarshal(text, &raw); err != nil {
		return r, err
	}
	if n := bytes.Count(raw.Members, []byte(",")) + 1; n != 2*workers {
		return r, fmt.Errorf("it has %d numbers, want 2 for each of %d workers", n, workers)
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
