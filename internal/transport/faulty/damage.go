package faulty

import (
	"math/rand/v2"
	"unsafe"

	"github.com/lockstep-ml/lockstep/transport"
)

// headerBytes is the size of the fields of a header, which has no padding before its last field.
const headerBytes = int(unsafe.Offsetof(transport.Header{}.Order) + unsafe.Sizeof(transport.Header{}.Order))

// FlipBit returns the header with one bit wrong.
func FlipBit(h transport.Header, random *rand.Rand) transport.Header {
	bit := random.IntN(8 * headerBytes)
	(*[headerBytes]byte)(unsafe.Pointer(&h))[bit/8] ^= 1 << (bit % 8)
	return h
}
