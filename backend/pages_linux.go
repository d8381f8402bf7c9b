package backend

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// preferHugePages asks the kernel to keep memory in pages of 2 MiB: an execution walks through all of it, and a
// processor has too few translations for so many small pages. The kernel may refuse.
func preferHugePages(memory []uint64) {
	const page = 2 << 20
	if len(memory) == 0 {
		return
	}
	first := unsafe.Pointer(&memory[0])
	skip := int(-uintptr(first) & (page - 1))
	if n := (len(memory)*8 - skip) &^ (page - 1); n > 0 {
		_ = unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(first, skip)), n), unix.MADV_HUGEPAGE)
	}
}
