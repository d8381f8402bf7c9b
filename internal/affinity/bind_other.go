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

// CanYield reports that Yield has no effect.
const CanYield = false

// Yield does nothing.
func Yield() {}

// Mover moves no thread on this system.
type Mover struct{}

// Leave does nothing.
func (*Mover) Leave() {}
