//go:build !linux

package checkpoint

// firstPIDs is the namespace of processes in no container.
const firstPIDs = ""

// identify would fill in what tells a process from all others: here its host's name and its PID must do.
func (*Holder) identify() bool { return false }
