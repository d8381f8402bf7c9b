package mem

import "golang.org/x/sys/unix"

// preferHuge asks the system to back memory with huge pages. Where it does not, the memory is as good, and slower.
func preferHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
