package membership

import (
	"sync/atomic"
	"syscall"
)

// Through returns the same file for a process whose accesses wait in pass while it is stopped, and whose writes fail
// while its disk is full.
func (n *NodeFile) Through(pass func(), full *atomic.Bool) *NodeFile {
	return &NodeFile{file: &gated{n, pass, full}, slots: n.slots}
}

type gated struct {
	n    *NodeFile
	pass func()
	full *atomic.Bool
}

func (g *gated) ReadAt(b []byte, at int64) (int, error) {
	g.pass()
	return g.n.file.ReadAt(b, at)
}

func (g *gated) WriteAt(b []byte, at int64) (int, error) {
	if g.pass(); g.full.Load() {
		return 0, syscall.ENOSPC
	}
	return g.n.file.WriteAt(b, at)
}

func (g *gated) Close() error { return g.n.file.Close() }
