// Package shm is a transport over shared memory, for the processes of one host.
//
// [Open] opens a group of ranks, one or several per process, which are one domain. It needs Linux, outside of sandboxes
// that forbid memfd_create or locks of open files. Elsewhere [HostID] is empty, Open returns an error, and package
// mixed joins the processes by package tcp.
//
// # Shared files
//
// A control file holds the slots, flags, frames and staging buffers of the ranks. Every process adds an arena: a large
// file, of which only used pages take memory. NewBuffer allocates from it; all processes map it from the start. The
// files are memfds without a name, and sealed against changes of their length. So nothing is left behind, however the
// processes end.
//
// Data written by a peer is not trusted. Offsets, lengths and counts are checked before use; a peer that writes invalid
// values is reported as down.
//
// # Set-up
//
// The process with rank 0 listens on an abstract unix socket. The others dial it until the context ends. Both sides
// verify that they belong to one user (SO_PEERCRED), open the same group, and pass [Config.Authenticate]. That
// connection passes the files, and an eventfd of every process, its bell. No other connection is made.
//
// # Waiting
//
// A wait polls for some microseconds, and yields (package internal/transport/waiting). Then the thread of the rank
// naps in a futex of shared memory, for milliseconds. After that the rank blocks in [transport.Park] until the peer
// rings the bell of its process.
//
// The end of a process's connection shows the process with rank 0 at once that it has ended; that one notifies all
// others. In case it is stopped, the others also poll the locks that each process holds while it lives: about once a
// second, and often when it has left. A stopped process is not detected here; waits for it end at the caller's
// deadline.
//
// # The race detector
//
// The race detector does not track shared memory: it reports no races there, and flags create no happens-before
// relation for it.
package shm

import (
	"errors"
	"fmt"
	"math/bits"
	"net"
	"strings"
)

// Config describes a group and the ranks of this process. All processes of a group must use the same values, except for
// Ranks and ArenaBytes.
type Config struct {
	// Name identifies the group on this host. It must be unique among the groups that are open or being opened there.
	Name string
	// Job, Epoch and Group must be equal in all processes. So a process of another job, or one that was stopped during
	// a rebuild, is refused.
	Job   string
	Epoch uint32
	Group uint64
	// Size is the number of ranks of the group, at most [SizeMax].
	Size int
	// Ranks holds the ranks of this process, in increasing order. The process with rank 0 listens, the others dial.
	Ranks []int
	// Authenticate, if not nil, authenticates the two ends of a new connection to each other after the hello. It must
	// read and write on conn no more than its own messages; the end of the handshake's context interrupts it. An error
	// refuses the process. Package cluster/secret makes one. All processes must have one, or none.
	Authenticate func(conn net.Conn, dialed bool, hello []byte) error
	// ArenaBytes bounds the memory that NewBuffer can allocate in this process at a time. It takes address space in
	// every process, and memory only for used pages. 0: the memory size of the host. Processes may use different
	// values.
	ArenaBytes int
}

// WhyApart describes how two processes of one host differ, by their [HostID]s, so that they cannot share memory:
// "different users (1000 and 1001)". It returns "" if they are equal, or not of one host as far as can be known: a
// network namespace counts as a host.
func WhyApart(a, b string) string {
	one, other := strings.Fields(a), strings.Fields(b)
	if len(one) != hostIDParts || len(other) != hostIDParts || one[0] != other[0] || one[1] != other[1] {
		return ""
	}
	var out []string
	for i, name := range [hostIDParts]string{"", "", "user namespaces", "users", "architectures"} {
		if one[i] != other[i] {
			out = append(out, fmt.Sprintf("different %s (%s and %s)", name, one[i], other[i]))
		}
	}
	return strings.Join(out, ", ")
}

var errNoSharedMemory = errors.New("shm: processes cannot share memory on this system: open the group with package " +
	"mixed, which then joins them by TCP")

// hostIDParts are the parts of a [HostID]: the boot, the namespaces of network and of users, the user, the
// architecture.
const hostIDParts = 5

// SizeMax bounds the number of ranks of a group: 1,024, and 256 with addresses of 32 bits.
const SizeMax = 256 << (bits.UintSize / 64 * 2)

// check returns an error if a field of c is invalid.
func (c *Config) check() error {
	switch {
	case c.Name == "":
		return errors.New("shm: Config.Name is empty: it must identify the group on this host")
	case c.Size < 1 || c.Size > SizeMax:
		return fmt.Errorf("shm: Config.Size is %d, want 1 to %d ranks", c.Size, SizeMax)
	case len(c.Ranks) == 0:
		return errors.New("shm: Config.Ranks is empty: a process needs a rank")
	case c.ArenaBytes < 0:
		return fmt.Errorf("shm: Config.ArenaBytes is %d", c.ArenaBytes)
	case len(c.Job) > jobMax:
		return fmt.Errorf("shm: Config.Job has %d bytes, at most %d can be compared", len(c.Job), jobMax)
	}
	return checkRanks(c.Ranks, c.Size)
}

// jobMax bounds the length of the job id in the handshake, in bytes.
const jobMax = 1 << 10

// checkRanks returns an error if the ranks that a process claims are invalid.
func checkRanks(ranks []int, size int) error {
	for i, r := range ranks {
		if r < 0 || r >= size || i > 0 && r <= ranks[i-1] {
			return fmt.Errorf("shm: ranks %v of a group of %d: want increasing numbers from 0 to %d", ranks, size, size-1)
		}
	}
	return nil
}
