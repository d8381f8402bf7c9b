// Package foreign finds third-party libraries that a program can use without being linked with them: MPI, NCCL and the
// CUDA runtime. It loads them with dlopen, without cgo, and queries their versions.
//
// Loading a library runs its code. A program that only needs to know whether a library exists should call this package
// in a separate process.
package foreign

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// Library is a library that was searched for.
type Library struct {
	Name    string // "MPI", "NCCL", "CUDA runtime"
	Path    string // the name or path by which it was found
	Version string // as the library reports it

	handle uintptr
}

// Symbol returns the address of a function or a variable of the library.
func (l Library) Symbol(name string) (uintptr, error) { return symbol(l.handle, name) }

// kind describes how to find a library and query its version.
type kind struct {
	name     string
	variable string   // environment variable with a path, which takes precedence
	files    []string // names for the system's loader
	version  func(handle uintptr) (string, error)
}

var kinds = map[string]kind{
	"mpi": {"MPI", "LOCKSTEP_MPI", []string{
		"libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so",
		"libmpi.dylib",
	}, mpiVersion},
	"cuda": {
		"CUDA runtime", "LOCKSTEP_CUDART",
		[]string{"libcudart.so.13", "libcudart.so.12", "libcudart.so"},
		cudaVersion,
	},
	"nccl": {"NCCL", "LOCKSTEP_NCCL", []string{"libnccl.so.2", "libnccl.so"}, ncclVersion},
}

// Names returns the names that [Find] knows.
func Names() []string { return []string{"mpi", "nccl", "cuda"} }

// Find loads the library of that name ("mpi", "nccl", "cuda") and queries its version. It loads the file that
// LOCKSTEP_MPI, LOCKSTEP_NCCL or LOCKSTEP_CUDART names, else searches where the system's loader does. Of several MPI
// libraries it prefers the one whose launcher has started this process, if that can be detected. The library remains
// loaded.
func Find(name string) (Library, error) {
	k, ok := kinds[name]
	if !ok {
		return Library{}, fmt.Errorf("foreign: no library %q: want one of %s", name, strings.Join(Names(), ", "))
	}
	files := slices.Clone(k.files)
	if _, hydra := os.LookupEnv("PMI_RANK"); hydra && os.Getenv("OMPI_COMM_WORLD_SIZE") == "" {
		// Started by the launcher of MPICH or a library derived from it: try these libraries first.
		slices.SortStableFunc(files, func(a, b string) int { return openMPIs(a) - openMPIs(b) })
	}
	if path := os.Getenv(k.variable); path != "" {
		files = []string{path}
	}
	var why []string
	for _, file := range files {
		handle, err := open(file)
		if err != nil {
			if text := err.Error(); !slices.Contains(why, text) {
				why = append(why, text)
			}
			continue
		}
		version, err := k.version(handle)
		if err != nil {
			return Library{}, fmt.Errorf("foreign: %s: %w", file, err)
		}
		return Library{Name: k.name, Path: file, Version: version, handle: handle}, nil
	}
	return Library{}, fmt.Errorf("foreign: no %s: %s", k.name, strings.Join(why, "; "))
}

// openMPIs is 1 for the file name that only Open MPI's library has.
func openMPIs(file string) int {
	if file == "libmpi.so.40" {
		return 1
	}
	return 0
}

// firstLine returns the first line of a C string in a buffer.
func firstLine(b []byte) string {
	if end := slices.IndexFunc(b, func(c byte) bool { return c == 0 || c == '\n' }); end >= 0 {
		b = b[:end]
	}
	return strings.TrimSpace(string(b))
}

// ncclNumber writes NCCL's version number as people do: 22005 is 2.20.5, and before 2.9 2804 was 2.8.4.
func ncclNumber(n int) string {
	if n < 10000 {
		return fmt.Sprintf("%d.%d.%d", n/1000, n/100%10, n%100)
	}
	return fmt.Sprintf("%d.%d.%d", n/10000, n/100%100, n%100)
}
