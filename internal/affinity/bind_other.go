//go:build !linux

package affinity

import "runtime"

// Read returns no CPUs: this system binds no process.
func Read() CPUs { return CPUs{} }

// Allowed returns nil: the CPUs are unknown.
func Allowed() []int { return nil }

// together returns how many CPUs this process may use.
func together(int) int { return runtime.NumCPU() }

// Limits returns none: no limit of the CPU time is known.
func Limits() []Limit { return nil }

// Run calls f.
func Run(_ []int, f func()) { f() }

// Current returns -1: the CPU is unknown.
func Current() int { return -1 }

// Thread returns 0: the thread is unknown.
func Thread() int { return 0 }

// Yield does nothing.
func Yield() {}

// Mover moves no thread on this system.
type Mover struct{}

// Leave does nothing.
func (*Mover) Leave(int, []int) {}
