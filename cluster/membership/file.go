package membership

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync"
)

// NodeFile is the file through which the workers of a node and its reporter exchange heartbeats and views: one slot for
// each worker, and one for the reporter's answer. A slot is written by one process at a time; a reader that sees half
// of a write reads again later. The file survives its writers: the reporter that replaces a lost one reads the
// same slots.
type NodeFile struct {
	file interface {
		io.ReaderAt
		io.WriterAt
		io.Closer
	}
	path  string // "": in memory
	slots int
}

const (
	slotBytes   = 2 << 10
	answerBytes = 1 << 20
	slotHead    = 16 // length (4), CRC of all after it (4), count (8); little-endian
)

// CreateNodeFile creates a node's file for a number of workers. It fails if the file exists.
func CreateNodeFile(path string, workers int) (*NodeFile, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("membership: creating a node's file: %w", err)
	}
	if _, err := f.WriteAt(make([]byte, (workers+1)*slotBytes), 0); err != nil { // a full disk fails now, not later
		f.Close()
		os.Remove(path)
		return nil, fmt.Errorf("membership: creating a node's file: %w", err)
	}
	return &NodeFile{file: f, path: path, slots: workers}, nil
}

// OpenNodeFile opens a node's file that another process of the node may have created.
func OpenNodeFile(path string, workers int) (*NodeFile, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("membership: opening the node's file: %w", err)
	}
	return &NodeFile{file: f, path: path, slots: workers}, nil
}

// NewMemoryFile returns the file of a node in this process's memory: for a worker that shares no folder with others.
func NewMemoryFile(workers int) *NodeFile {
	return &NodeFile{file: &memoryFile{}, slots: workers}
}

// memoryFile is a file in memory. It is safe for concurrent use.
type memoryFile struct {
	mu   sync.Mutex
	data []byte
}

func (f *memoryFile) ReadAt(b []byte, at int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if at+int64(len(b)) > int64(len(f.data)) {
		return 0, io.EOF
	}
	return copy(b, f.data[at:]), nil
}

func (f *memoryFile) WriteAt(b []byte, at int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if more := int(at) + len(b) - len(f.data); more > 0 {
		f.data = append(f.data, make([]byte, more)...)
	}
	return copy(f.data[at:], b), nil
}

func (f *memoryFile) Close() error { return nil }

// Remove removes the file's name. Processes that have it open continue to use it.
func (n *NodeFile) Remove() {
	if n.path != "" {
		os.Remove(n.path)
	}
}

// Close closes this process's handle. On nil it does nothing.
func (n *NodeFile) Close() error {
	if n == nil {
		return nil
	}
	return n.file.Close()
}

// write writes a slot; slot n.slots is the answer.
func (n *NodeFile) write(slot int, count uint64, payload []byte) error {
	most := slotBytes - slotHead
	if slot == n.slots {
		most = answerBytes
	}
	if len(payload) > most {
		return fmt.Errorf("membership: %d bytes for a slot of %d", len(payload), most)
	}
	b := make([]byte, slotHead, slotHead+len(payload))
	b = append(b, payload...)
	le := binary.LittleEndian
	le.PutUint32(b, uint32(len(payload)))
	le.PutUint64(b[8:], count)
	le.PutUint32(b[4:], crc32.Checksum(b[8:], castagnoli))
	_, err := n.file.WriteAt(b, int64(slot)*slotBytes)
	return err
}

// read reads a slot whose count differs from the last one. It returns false if there is nothing new, or half of it.
func (n *NodeFile) read(slot int, last uint64) (count uint64, payload []byte, fresh bool) {
	var head [slotHead]byte
	at := int64(slot) * slotBytes
	if _, err := n.file.ReadAt(head[:], at); err != nil {
		return 0, nil, false
	}
	le := binary.LittleEndian
	bytes, sum := le.Uint32(head[:]), le.Uint32(head[4:])
	if count = le.Uint64(head[8:]); count == last || count == 0 || bytes > answerBytes {
		return 0, nil, false
	}
	b := make([]byte, 8+bytes)
	copy(b, head[8:])
	if _, err := n.file.ReadAt(b[8:], at+slotHead); err != nil || crc32.Checksum(b, castagnoli) != sum {
		return 0, nil, false
	}
	return count, b[8:], true
}

// answer reads the reporter's answer. It returns false if the answer has the count last: then it was read before.
func (n *NodeFile) answer(last uint64) (a answer, ok bool) {
	count, text, fresh := n.read(n.slots, last)
	if !fresh || decode(text, &a) != nil {
		return answer{}, false
	}
	a.count = count
	return a, true
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
