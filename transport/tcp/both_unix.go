//go:build unix && !linux

package tcp

import "golang.org/x/sys/unix"

// writeBoth writes from the first slice only; the next call writes the second.
func writeBoth(fd int, out *[2][]byte) (int, error) { return unix.Write(fd, out[0]) }

// readBoth fills the first slice only; the next call fills the second.
func readBoth(fd int, in *[2][]byte) (int, error) { return unix.Read(fd, in[0]) }
