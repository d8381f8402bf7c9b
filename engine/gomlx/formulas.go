package gomlx

import (
	"crypto/sha256"
	"fmt"
	"regexp"
	"strings"

	"github.com/gomlx/gomlx/core/graph"
)

// sameFormulas reports whether the update programs of several parts compute every new value by the same
// formula as one program for all gradients. They do not if the optimizer combines gradients, for example by
// their global norm or their number. The formula of a piece is that of the whole but for the shape.
func sameFormulas(one, parts []*executable) bool {
	known, want := map[string]formulas{}, map[string]int{} // by shape; the output by path
	for i, path := range one[0].changes {
		want[path] = i
	}
	seen := map[string]bool{}
	for _, x := range parts {
		whole, part := "", formulas{}
		if x.piece != nil {
			whole, part.shape = x.whole, x.flat
		}
		if _, there := known[whole]; !there {
			known[whole] = formulas{shape: whole, nodes: map[*graph.Node]formula{}}
		}
		part.nodes = map[*graph.Node]formula{}
		for i, path := range x.changes {
			output, there := want[path]
			if !there {
				return false
			}
			w, ok := known[whole].of(one[0].outputs[output])
			if !ok {
				return false
			}
			if f, ok := part.of(x.outputs[i]); !ok || f != w {
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
type formulas struct {
	shape string // the dimensions of a parameter, which are left out of its formulas; "": none
	nodes map[*graph.Node]formula
}

// nodeNumber matches GoMLX's reference to another node of the graph.
var nodeNumber = regexp.MustCompile(`#[0-9]+`)

// nodeMemory matches what GoMLX prints of the size of a node's memory.
var nodeMemory = regexp.MustCompile(` - mem: \[[^]]*\]$`)

// printed returns dimensions as GoMLX prints them.
func printed(dimensions []int) string { return strings.ReplaceAll(fmt.Sprint(dimensions), " ", ", ") }

// of returns the formula of n. ok is false if n depends on a function of the graph or on a large constant, whose
// contents GoMLX does not expose.
func (known formulas) of(n *graph.Node) (f formula, ok bool) {
	if f, ok := known.nodes[n]; ok {
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
	line := nodeNumber.ReplaceAllString(n.String(), "#") // operation, settings and shapes
	if known.shape != "" {
		line = strings.ReplaceAll(nodeMemory.ReplaceAllString(line, ""), known.shape, "[]")
	}
	text := []byte(line)
	for _, in := range n.Inputs() {
		f, ok := known.of(in)
		if !ok {
			return f, false
		}
		text = fmt.Appendf(text, " %x", f)
	}
	f = sha256.Sum256(text)
	known.nodes[n] = f
	return f, true
}
