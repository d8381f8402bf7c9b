//go:build !linux

package mem

// preferHuge does nothing: this system chooses the size of pages itself.
func preferHuge([]byte) {}
