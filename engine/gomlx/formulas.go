package gomlx

import (
	"crypto/sha256"
	"fmt"
	"regexp"

	"github.com/gomlx/gomlx/core/graph"
)

// sameFormulas reports whether the update programs of several parts compute every new value by the same
// formula as one program for all gradients. They do not if the optimizer combines gradients, for example by
// their global norm or their number.
func sameFormulas(one, parts []*executable) bool {
	want := map[string]formula{}
	known := formulas{}
	for _, x := range one {
		for i, path := range x.changes {
			f, ok := known.of(x.outputs[i])
			if !ok {
				return false
			}
			want[path] = f
		}
	}
	seen := map[string]bool{}
	for _, x := range parts {
		known = formulas{}
		for i, path := range x.changes {
			f, ok := known.of(x.outputs[i])
			if w, there := want[path]; !ok || !there || f != w {
				return false
			}
			seen[path] = true
		}
	}
	return len(seen) == len(want)
}

// formula is a hash of how a node is computed from the graph's parameters, which are known by their names.
type formula [sha256.Size]byte

// formulas caches the formulas of a graph's nodes.
type formulas map[*graph.Node]formula

// nodeNumber matches GoMLX's reference to another node of the graph.
var nodeNumber = regexp.MustCompile(`#[0-9]+`)

// of returns the formula of n. ok is false if n depends on a function of the graph or on a large constant, whose
// contents GoMLX does not expose.
func (known formulas) of(n *graph.Node) (f formula, ok bool) {
	if f, ok := known[n]; ok {
		return f, true
	}
	switch n.Type() {
	case graph.NodeTypeCall, graph.NodeTypeWhile, graph.NodeTypeIf, graph.NodeTypeSort:
		return f, false
	case graph.NodeTypeConstant: // GoMLX prints the values of small ones only
		if n.Shape().Size() >= graph.MinConstValueSizeToKeep {
			return f, false
		}
	}
	text := []byte(nodeNumber.ReplaceAllString(n.String(), "#")) // operation, settings and shapes
	for _, in := range n.Inputs() {
		f, ok := known.of(in)
		if !ok {
			return f, false
		}
		text = fmt.Appendf(text, " %x", f)
	}
	f = sha256.Sum256(text)
	known[n] = f
	return f, true
}
