//go:build (linux || darwin) && (amd64 || arm64)

package foreign

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"
)

func open(file string) (uintptr, error) {
	return purego.Dlopen(file, purego.RTLD_NOW|purego.RTLD_GLOBAL)
}

func symbol(handle uintptr, name string) (uintptr, error) { return purego.Dlsym(handle, name) }

// Call calls a C function of up to 15 arguments, which are integers or addresses of memory that stays where it is, and
// returns its int. The calling goroutine's thread carries it out.
func Call(function uintptr, args ...uintptr) int32 {
	r, _, _ := purego.SyscallN(function, args...)
	return int32(r)
}

// Text calls a C function that returns a text which stays where it is.
func Text(function uintptr, args ...uintptr) string {
	r, _, _ := purego.SyscallN(function, args...)
	const textMax = 512
	p := *(*unsafe.Pointer)(unsafe.Pointer(&r)) // of C's memory
	if p == nil {
		return ""
	}
	n := 0
	for n < textMax && *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// mpiVersion asks MPI_Get_library_version, which may be called before MPI_Init (MPI 3.1, section 8.1.1).
func mpiVersion(handle uintptr) (string, error) {
	const textMax = 8192 // MPI_MAX_LIBRARY_VERSION_STRING: 256 in Open MPI, 8192 in MPICH
	f, err := purego.Dlsym(handle, "MPI_Get_library_version")
	if err != nil {
		return "", err
	}
	var get func(text *byte, length *int32) int32
	purego.RegisterFunc(&get, f)
	text, length := make([]byte, textMax), int32(0)
	if code := get(unsafe.SliceData(text), &length); code != 0 {
		return "", fmt.Errorf("MPI_Get_library_version returned %d", code)
	}
	return firstLine(text), nil
}

// ncclVersion asks ncclGetVersion, which needs no GPU.
func ncclVersion(handle uintptr) (string, error) {
	f, err := purego.Dlsym(handle, "ncclGetVersion")
	if err != nil {
		return "", err
	}
	var get func(version *int32) int32
	purego.RegisterFunc(&get, f)
	var version int32
	if code := get(&version); code != 0 {
		return "", fmt.Errorf("ncclGetVersion returned %d", code)
	}
	if version <= 0 {
		return "", errors.New("ncclGetVersion returned no version")
	}
	return ncclNumber(int(version)), nil
}

// cudaVersion asks cudaRuntimeGetVersion, which needs no GPU.
func cudaVersion(handle uintptr) (string, error) {
	f, err := purego.Dlsym(handle, "cudaRuntimeGetVersion")
	if err != nil {
		return "", err
	}
	var get func(version *int32) int32
	purego.RegisterFunc(&get, f)
	var version int32
	if code := get(&version); code != 0 {
		return "", fmt.Errorf("cudaRuntimeGetVersion returned %d", code)
	}
	return fmt.Sprintf("%d.%d", version/1000, version%1000/10), nil
}
