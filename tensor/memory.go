package tensor

import (
	"fmt"
	"unsafe"
)

// MemoryKind is the kind of a [Memory].
type MemoryKind uint8

// The kinds of memory.
const (
	Host   MemoryKind = iota // ordinary memory of this process
	Shared                   // memory mapped by several processes of this host
	Device                   // an accelerator's memory: Ptr cannot be dereferenced
)

// String returns "host", "shared" or "device".
func (k MemoryKind) String() string {
	switch k {
	case Host:
		return "host"
	case Shared:
		return "shared"
	case Device:
		return "device"
	}
	return fmt.Sprintf("MemoryKind(%d)", uint8(k))
}

// Owner keeps a [Memory] alive. Code that uses the memory after the call that passed it calls Retain first and
// Release afterwards. Memory of the Go heap needs no owner.
type Owner interface {
	Retain()
	Release()
}

// Memory is a region of bytes, with an optional owner. It is a plain value; copying it does not copy the bytes
// and does not retain them. The zero value is an empty region.
type Memory struct {
	Ptr    unsafe.Pointer // first byte; nil only if Bytes is 0
	Bytes  int            // length in bytes
	Kind   MemoryKind     // kind of memory
	Device int            // index of the device it belongs to, among devices of its kind
	Owner  Owner          // nil: the garbage collector keeps it alive
}

// Slice returns the bytes [lo, hi) of m. It panics if they are out of range.
func (m Memory) Slice(lo, hi int) Memory {
	if lo < 0 || hi < lo || hi > m.Bytes {
		panic(fmt.Sprintf("tensor: Slice(%d, %d) of a memory of %d bytes", lo, hi, m.Bytes))
	}
	m.Bytes = hi - lo
	switch {
	case lo == hi:
		m.Ptr = nil // one past the end may belong to another allocation
	case m.Ptr != nil:
		m.Ptr = unsafe.Add(m.Ptr, lo)
	}
	return m
}

// HostBytes returns the bytes of m as a slice that shares its memory. It panics for device memory.
func (m Memory) HostBytes() []byte {
	if m.Kind == Device {
		panic("tensor: HostBytes of device memory")
	}
	return unsafe.Slice((*byte)(m.Ptr), m.Bytes)
}

// HostMemory returns the memory of the elements of s, without copying.
func HostMemory[T Element](s []T) Memory {
	var zero T
	if len(s) == 0 {
		return Memory{}
	}
	return Memory{Ptr: unsafe.Pointer(unsafe.SliceData(s)), Bytes: len(s) * int(unsafe.Sizeof(zero))}
}

// CacheLine is the size of a cache line in bytes, at which the memory of collective calls begins.
const CacheLine = 64

// AlignedBytes returns zeroed memory of the Go heap whose address is a multiple of align, a power of 2.
func AlignedBytes(bytes, align int) []byte {
	block := make([]byte, bytes+align-1)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(block)))) & (align - 1)
	return block[skip:][:bytes:bytes]
}
