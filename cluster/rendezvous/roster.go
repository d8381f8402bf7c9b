package rendezvous

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// The roster is the record by which the workers get the registrations of all. Most workers have the same registration
// as others, besides their number, process, port and nonce: for these it has only the first such worker, the process id
// and the port.

// memberMark begins the entry of a worker that has the registration of an earlier one; others begin with "{".
const memberMark = 0

// packRoster encodes registrations, which are in the order of their workers, for the outcome.
func packRoster(registrations []Registration) ([]byte, error) {
	first := map[string]int{} // the first worker with each registration
	entries := make([][]byte, len(registrations))
	for w, c := range registrations {
		own, err := json.Marshal(&c)
		if err != nil {
			return nil, err
		}
		pid, port := c.PID, 0
		c.Addr, port = withoutPort(c.Addr)
		c.Worker, c.PID, c.Nonce = 0, 0, ""
		common, err := json.Marshal(&c)
		if err != nil {
			return nil, err
		}
		same, known := first[string(common)]
		if !known {
			first[string(common)], entries[w] = w, own
			continue
		}
		b := binary.AppendUvarint([]byte{memberMark}, uint64(same))
		entries[w] = binary.AppendUvarint(binary.AppendVarint(b, int64(pid)), uint64(port))
	}
	return pack(joined(entries)), nil
}

// unpackRoster decodes what packRoster has encoded. Workers with the registration of an earlier one share its data, and
// have no nonce.
func unpackRoster(packed []byte, workers int) ([]Registration, error) {
	record, err := unpack(packed)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: the roster: %w", err)
	}
	entries, err := split(record, workers)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: the roster: %w", err)
	}
	out := make([]Registration, workers)
	for w, entry := range entries {
		c := &out[w]
		if len(entry) > 0 && entry[0] == memberMark {
			*c, err = member(entry[1:], out[:w])
		} else {
			*c, err = parseRegistration(entry)
		}
		if err == nil && (c.Worker != w || c.Workers != workers) {
			err = fmt.Errorf("it is that of %v, of %d", c, c.Workers)
		}
		if err != nil {
			return nil, fmt.Errorf("rendezvous: the roster's entry of worker %d of %d: %w", w, workers, err)
		}
	}
	return out, nil
}

// member decodes the entry of the worker that follows these, after its mark.
func member(entry []byte, earlier []Registration) (Registration, error) {
	b := bytes.NewReader(entry)
	same, err1 := binary.ReadUvarint(b)
	pid, err2 := binary.ReadVarint(b)
	port, err3 := binary.ReadUvarint(b)
	if err := cmp.Or(err1, err2, err3); err != nil || same >= uint64(len(earlier)) || b.Len() > 0 {
		return Registration{}, cmp.Or(err, errors.New("it names no earlier worker"))
	}
	c := earlier[same]
	c.Worker, c.PID, c.Nonce = len(earlier), int(pid), ""
	if c.Addr, _ = withoutPort(c.Addr); port > 0 {
		c.Addr += ":" + strconv.FormatUint(port, 10)
	}
	return c, nil
}

// withoutPort splits the port off an address; 0 if it has none.
func withoutPort(addr string) (host string, port int) {
	i := strings.LastIndexByte(addr, ':')
	n, err := strconv.Atoi(addr[i+1:])
	if i < 0 || err != nil || n < 1 || strconv.Itoa(n) != addr[i+1:] {
		return addr, 0
	}
	return addr[:i], n
}
