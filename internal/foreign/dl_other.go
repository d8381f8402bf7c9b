//go:build !((linux || darwin) && (amd64 || arm64))

package foreign

import (
	"fmt"
	"runtime"
)

func open(string) (uintptr, error) {
	return 0, errPlatform()
}

func errPlatform() error {
	return fmt.Errorf("libraries cannot be loaded on %s/%s", runtime.GOOS, runtime.GOARCH)
}

func mpiVersion(uintptr) (string, error) { return "", nil }

func ncclVersion(uintptr) (string, error) { return "", nil }

func cudaVersion(uintptr) (string, error) { return "", nil }

func symbol(uintptr, string) (uintptr, error) { return 0, errPlatform() }

// Call calls a C function, which there is none of here.
func Call(uintptr, ...uintptr) int32 { return -1 }

// Text calls a C function, which there is none of here.
func Text(uintptr, ...uintptr) string { return "" }
