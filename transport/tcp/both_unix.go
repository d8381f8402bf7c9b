//go:build unix && !linux

package tcp

import "golang.org/x/sys/unix"

// writeBoth writes of the first slice what can be written; the second is the next call's.
func writeBoth(fd int, out *[2][]byte) (int, error) { return unix.Write(fd, out[0]) }

// readBoth fills the first slice; the second is the next call's.
func readBoth(fd int, in *[2][]byte) (int, error) { return unix.Read(fd, in[0]) }
