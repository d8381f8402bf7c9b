//go:build !linux

package backend

// preferHugePages does nothing: other kernels choose the size of pages themselves.
func preferHugePages([]uint64) {}
