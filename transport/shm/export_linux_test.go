package shm

import (
	"context"
	"os"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Address returns the name of a group's socket.
func Address(name string) string { return address(name).Name }

// ArenaOn creates an arena in a file of that length, and returns its function that allocates memory.
func ArenaOn(f *os.File, bytes int64) (allocate func(bytes int) (tensor.Memory, error), err error) {
	a, err := arenaOf(f, bytes)
	if err != nil {
		return nil, err
	}
	return a.allocate, nil
}

// BackBy calls back for a mapping of a file, with another function in place of unix.Madvise.
func BackBy(f *os.File, b []byte, advise func(b []byte, advice int) error) error {
	old := madvise
	defer func() { madvise = old }()
	madvise = advise
	return back(f, 0, b)
}

// EndsOn creates the endpoints of two ranks of this process, in a group whose memory is a file.
func EndsOn(f *os.File) (ends [2]transport.Endpoint, err error) {
	if err := f.Truncate(int64(layoutOf(2).bytes)); err != nil {
		return ends, err
	}
	w := &world{
		cfg: Config{Size: 2, Ranks: []int{0, 1}}, processes: []process{{bell: noBell}}, processOf: []int{0, 0},
		control: f,
	}
	if w.root, err = newGroup(w, 0, []int{0, 1}); err != nil {
		return ends, err
	}
	w.arena = &arena{}
	return [2]transport.Endpoint{w.root.join(0), w.root.join(1)}, nil
}

// OpenUnpolled is Open in a process whose bell Go's poller does not watch.
func OpenUnpolled(ctx context.Context, cfg Config) ([]transport.Endpoint, error) {
	old := bellFile
	defer func() { bellFile = old }()
	bellFile = func(fd int) *os.File {
		unix.SetNonblock(fd, false)
		f := os.NewFile(uintptr(fd), "bell")
		unix.SetNonblock(fd, true)
		return f
	}
	return Open(ctx, cfg)
}

// Join joins a group like Open, but opens no ranks. The caller must keep what it returns.
func Join(ctx context.Context, cfg Config) (joined any, err error) { return join(ctx, cfg) }
