package nccl

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/internal/foreign"
)

// scratch is memory that C writes to. It is on the heap, so it does not move.
type scratch struct {
	number int32
	handle uintptr
	id     [idBytes]byte
}

// idBytes is NCCL_UNIQUE_ID_BYTES.
const idBytes = 128

func (a *api) check(name string, code int32) error { return resultError(a.f.errorString, name, code) }

func (a *api) cudaCheck(name string, code int32) error {
	return resultError(a.f.cudaErrorString, name, code)
}

// resultError returns the error for a function's result.
func resultError(errorString uintptr, name string, code int32) error {
	if code == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s (error %d)", name, foreign.Text(errorString, uintptr(code)), code)
}
