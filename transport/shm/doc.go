// Package shm connects the processes of one host through shared memory.
//
// [Open] makes a group of ranks, one or several per process. On Linux all ranks of the group are one domain: each
// endpoint is a [transport.Marker], [transport.Allocator], [transport.Splitter] and [transport.Placer]. On other systems, and
// where a sandbox forbids shared memory (memfd_create), the ranks exchange frames over unix sockets, by the protocol of
// package tcp; [HostID] then is empty.
//
// # What is shared
//
// A control file holds what the ranks of a group say to each other: slots, marks, frames, and a stage for every rank. Every
// process adds an arena, a large file of which only the pages in use cost memory; [transport.Allocator] gives out parts of
// it, which all processes have mapped from the beginning. The files are memfds without a name, sealed against a change of
// their length: nothing is left behind, however the processes end.
//
// What a peer writes is never trusted to be well-formed. Offsets, lengths and counts are held against what they must be
// before they are used; a peer that writes anything else is reported as down.
//
// # Set-up
//
// The process that has rank 0 listens on an abstract unix socket, the others dial it until the context ends. Both sides
// prove that they are of one user (SO_PEERCRED) and know the same token, and that they mean the same group. The files, and
// a socket between any two processes, travel over that connection.
//
// # Waiting
//
// A wait spins for some microseconds if the host has a processor for every rank. Then it blocks, and is woken through the
// socket between the two processes: a byte there says "look again". The end of the socket says that the process is dead,
// which is seen at once; a process that is stopped but alive is not seen here, only by the caller's deadline.
//
// # The race detector
//
// The race detector does not see shared memory: it neither reports races there nor learns from the marks that one access
// comes after another.
package shm

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Config says which group a process joins, and with which ranks. All processes of a group give the same, but for Ranks.
type Config struct {
	// Name of the meeting place. No other group that is being set up or is open on this host at the same time may use it.
	Name string
	// Job, Epoch and Group say what the group is for. They are compared, so that a process of another job, or one that
	// slept through a rebuild, is refused.
	Job   string
	Epoch uint32
	Group uint64
	// Size is the number of ranks of the group, at most [SizeMax].
	Size int
	// Ranks are this process's, in increasing order. The process that has rank 0 listens, the others dial.
	Ranks []int
	// Token is a secret that all processes must know. It does not travel. Empty: none is asked for.
	Token []byte
	// ArenaBytes bounds what NewBuffer can give out in this process at a time. It costs address space in every process,
	// memory only as far as it is used. 0: as much as the host has memory. Processes may differ in it.
	ArenaBytes int
}

// WhyApart says in what two processes of one host differ, by their [HostID]s, so that they cannot share memory: "different users
// (1000 and 1001)". It returns "" if they are equal, or not of one host as far as can be known: a network namespace counts as a
// host.
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

// hostIDParts are the parts of a [HostID]: the boot, the namespaces of network and of users, the user, the architecture.
const hostIDParts = 5

// SizeMax bounds the number of ranks of a group.
const SizeMax = 256

// check returns what is wrong with c.
func (c *Config) check() error {
	switch {
	case c.Name == "":
		return errors.New("shm: Config.Name is empty: the processes need a name to meet at")
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

// jobMax bounds the job's id in the handshake, in bytes.
const jobMax = 1 << 10

// checkRanks returns what is wrong with the ranks that a process claims.
func checkRanks(ranks []int, size int) error {
	for i, r := range ranks {
		if r < 0 || r >= size || i > 0 && r <= ranks[i-1] {
			return fmt.Errorf("shm: ranks %v of a group of %d: want increasing numbers from 0 to %d", ranks, size, size-1)
		}
	}
	return nil
}

// checkList returns what is wrong with the list of ranks of a group that rank splits off from one of size ranks.
func checkList(ranks []int, rank, size int) error {
	seen := make([]bool, size)
	for _, r := range ranks {
		if r < 0 || r >= size || seen[r] {
			return fmt.Errorf("shm: a group of ranks %v of %d: want different numbers from 0 to %d", ranks, size, size-1)
		}
		seen[r] = true
	}
	if !slices.Contains(ranks, rank) {
		return fmt.Errorf("shm: rank %d is not among the ranks %v of the group", rank, ranks)
	}
	return nil
}
