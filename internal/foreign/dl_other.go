//go:build !((linux || darwin) && (amd64 || arm64))

package foreign

import (
	"fmt"
	"runtime"
)

func open(string) (uintptr, error) {
	return 0, fmt.Errorf("libraries cannot be loaded on %s/%s", runtime.GOOS, runtime.GOARCH)
}

func mpiVersion(uintptr) (string, error) { return "", nil }

func ncclVersion(uintptr) (string, error) { return "", nil }
