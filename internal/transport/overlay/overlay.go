// Package overlay defines which processes of a group keep a connection from the start, and so the paths of news.
// Both ends of a connection, and the simulated network, compute the same graph from the number of processes.
package overlay

import "slices"

// MeshMax is the largest number of processes that are all linked with each other.
const MeshMax = 16

// base is the ratio of the distances to a process's neighbours. With 4,096 processes, each has 12 neighbours at
// distances 1, 4, 16, …, and 12 hops reach every other one. Base 2 would double the links and the messages for 6 hops
// less.
const base = 4

// Graph is the graph of the links. Its vertices are numbered from 0.
type Graph struct {
	size int
	mesh bool
}

// New returns the graph of a number of processes. Up to meshMax of them, usually [MeshMax], each is linked with every
// other one.
func New(size, meshMax int) Graph { return Graph{size, size <= meshMax} }

// Mesh reports whether every process is linked with every other one.
func (g Graph) Mesh() bool { return g.mesh }

// Linked reports whether two processes are linked: their distance around the ring is a power of 4.
func (g Graph) Linked(a, b int) bool {
	if g.mesh || a == b {
		return a != b
	}
	d := max(a, b) - min(a, b)
	return isPower(d) || isPower(g.size-d)
}

func isPower(d int) bool {
	p := 1
	for p < d {
		p *= base
	}
	return p == d
}

// Neighbours returns the processes linked with one, in increasing order.
func (g Graph) Neighbours(i int) []int {
	var out []int
	if g.mesh {
		for j := range g.size {
			if j != i {
				out = append(out, j)
			}
		}
		return out
	}
	for d := 1; d < g.size; d *= base {
		out = append(out, (i+d)%g.size, (i+g.size-d)%g.size)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Parent returns the parent of a process in a tree of links with root 0, and -1 for the root. Its depth is at most 3
// times the number of digits of size to base 4.
func (g Graph) Parent(i int) int {
	if i == 0 {
		return -1
	}
	if g.mesh {
		return 0
	}
	p := 1
	for i/p%base == 0 {
		p *= base
	}
	return i - p
}

// Children returns the processes whose parent a process is, in increasing order.
func (g Graph) Children(i int) []int {
	var out []int
	for _, j := range g.Neighbours(i) {
		if j > i && g.Parent(j) == i {
			out = append(out, j)
		}
	}
	return out
}
