package membership

// Through returns the same file for a process whose accesses wait in pass while it is stopped.
func (n *NodeFile) Through(pass func()) *NodeFile {
	return &NodeFile{file: &gated{n, pass}, slots: n.slots}
}

type gated struct {
	n    *NodeFile
	pass func()
}

func (g *gated) ReadAt(b []byte, at int64) (int, error) {
	g.pass()
	return g.n.file.ReadAt(b, at)
}

func (g *gated) WriteAt(b []byte, at int64) (int, error) {
	g.pass()
	return g.n.file.WriteAt(b, at)
}

func (g *gated) Close() error { return g.n.file.Close() }
