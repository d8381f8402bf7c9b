package shm

import (
	"os"

	"github.com/lockstep-ml/lockstep/tensor"
)

// OpenFrames is Open where there is no shared memory.
var OpenFrames = openFrames

// Address returns the name of a group's socket.
func Address(name string) string { return address(name).Name }

// ArenaOn makes an arena of a file of that length, and returns how it gives out memory.
func ArenaOn(f *os.File, bytes int64) (allocate func(bytes int) (tensor.Memory, error), err error) {
	a, err := arenaOf(f, bytes)
	if err != nil {
		return nil, err
	}
	return a.allocate, nil
}
