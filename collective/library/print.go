package library

import (
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
)

// fingerprint is a hash of what all ranks of a call must agree on: the same fields that package collective
// compares, except those that do not exist here.
func (t *team) fingerprint(seq uint64, c *collective.Call, count int) uint64 {
	h := fnv(1469598103934665603)
	h.add(uint64(t.cfg.Epoch))
	h.add(seq)
	h.add(uint64(c.Op))
	h.add(uint64(count))
	if c.Op != collective.Barrier {
		h.add(uint64(c.Type))
	}
	if c.Op.Reduces() {
		h.add(uint64(c.Reduce))
	}
	if c.Op.Rooted() && !pairwise(c) {
		h.add(uint64(c.Root))
	}
	h.add(uint64(len(c.Counts)))
	for _, n := range c.Counts {
		h.add(uint64(n))
	}
	if m := c.Manifest; m != nil {
		for _, b := range []byte(m.Name) {
			h.add(uint64(b))
		}
		if sameShape(c.Op) {
			for _, d := range m.Shape {
				h.add(uint64(d))
			}
		}
	}
	return uint64(h)
}

// sameShape reports whether the ranks' tensors must have the same shape.
func sameShape(op collective.Op) bool {
	switch op {
	case collective.AllReduce, collective.Reduce, collective.Broadcast, collective.AllToAll, collective.Send, collective.Recv:
		return true
	}
	return false
}

// fnv is the hash FNV-1a, of words.
type fnv uint64

func (h *fnv) add(word uint64) {
	for range 8 {
		*h = (*h ^ fnv(word&0xff)) * 1099511628211
		word >>= 8
	}
}

// textOf describes a call.
func textOf(c *collective.Call, count int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v", c.Op)
	if c.Op.Reduces() {
		fmt.Fprintf(&b, " %v", c.Reduce)
	}
	if c.Op != collective.Barrier {
		fmt.Fprintf(&b, " of %d %v", count, c.Type)
	}
	if c.Counts != nil {
		fmt.Fprintf(&b, " in parts of %v", c.Counts)
	}
	if pairwise(c) {
		fmt.Fprintf(&b, " with rank %d", c.Peer)
	} else if c.Op.Rooted() {
		fmt.Fprintf(&b, " with root %d", c.Root)
	}
	if m := c.Manifest; m != nil && m.Name != "" {
		fmt.Fprintf(&b, " (%q)", m.Name)
	}
	if m := c.Manifest; m != nil && m.Shape != nil {
		fmt.Fprintf(&b, " of shape %v", m.Shape)
	}
	return b.String()
}
