//go:build xla && cgo

package gomlx

/*
#include <stdlib.h>
#ifdef __linux__
#include <malloc.h>
#endif

static void keep_pages(void) {
#ifdef __GLIBC__
	mallopt(M_MMAP_THRESHOLD, 32 << 20);
	mallopt(M_TRIM_THRESHOLD, 1 << 30);
	mallopt(M_TOP_PAD, 16 << 20);
#endif
}
*/
import "C"

import "os"

// keepPages makes the C library's allocator keep the memory that XLA frees. XLA's CPU client allocates the
// outputs of every run. By default, glibc returns blocks of this size to the kernel and requests them again,
// zeroed, in the next step. For a model of 3 MB, that is over a thousand page faults a step, which two
// replicas of one process take under one lock. The limits set here are glibc's largest threshold (32 MiB),
// and a gigabyte of free memory at the end of a heap. Nothing changes if the user has set one of glibc's
// variables.
func keepPages() {
	for _, name := range []string{
		"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_",
		"GLIBC_TUNABLES",
	} {
		if os.Getenv(name) != "" {
			return
		}
	}
	C.keep_pages()
}
