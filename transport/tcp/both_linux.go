package tcp

import "golang.org/x/sys/unix"

// writeBoth writes the first slice, and the second if there is one, in one system call.
func writeBoth(fd int, out *[2][]byte) (int, error) {
	if len(out[1]) == 0 {
		return unix.Write(fd, out[0])
	}
	return unix.Writev(fd, out[:])
}

// readBoth fills the first slice, then the second with what is available, in one system call.
func readBoth(fd int, in *[2][]byte) (int, error) {
	if len(in[1]) == 0 {
		return unix.Read(fd, in[0])
	}
	return unix.Readv(fd, in[:])
}
