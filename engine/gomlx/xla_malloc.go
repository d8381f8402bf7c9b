//go:build xla && cgo

package gomlx

/*
#include <stdlib.h>
#ifdef __linux__
#include <malloc.h>
#endif

static void keep_pages(void) {
#ifdef __GLIBC__
	mallopt(M_ARENA_MAX, 1);
	mallopt(M_MMAP_MAX, 0);
	mallopt(M_TRIM_THRESHOLD, 1 << 30);
	mallopt(M_TOP_PAD, 16 << 20);
#endif
}
*/
import "C"

import "os"

// keepPages makes the C library's allocator keep the memory that XLA frees. XLA's CPU client allocates the outputs and
// the temporary buffer of every run. By default, glibc returns such blocks to the kernel and requests them again,
// zeroed, in the next step: over a thousand page faults a step for a model of 3 MB, and 16,000 for a transformer of
// 1.8 MB, which the replicas of a process take under one lock. Blocks above 32 MiB come from the kernel unless mmap is
// not used at all, and then only in the first arena, since the others end at 64 MiB. So there is one arena, which
// keeps up to a gigabyte of free memory at its end. Nothing changes if the user has set one of glibc's variables.
func keepPages() {
	for _, name := range []string{
		"MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_",
		"GLIBC_TUNABLES",
	} {
		if os.Getenv(name) != "" {
			return
		}
	}
	C.keep_pages()
}
