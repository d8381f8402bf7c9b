package rendezvous

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// Version is the version of the rendezvous, docs/rendezvous.md: of the TCP store's protocol, of the log in a folder,
// and of the keys that workers write into any store. It must be the same in all processes of a job. Writes have tokens
// from version 2 on: a process of version 1 would ignore them. From version 3 on worker 0 collects for all.
const Version = 3

const (
	instanceBytes = 16
	frameMax      = 8 << 20 // bytes of a frame: a key, a value and their header; longer responses use several frames
	chunkBytes    = 1 << 20 // a frame of entries is closed when it exceeds this
	requestBytes  = 28      // before the key
	tokenBytes    = 4       // before a token's key
)

// checksum is CRC-32C.
func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// clientID identifies a client across its connections; instance identifies a server.
type (
	clientID [16]byte
	instance [instanceBytes]byte
)

// hello returns a client's first message.
func (id clientID) hello() *listener.Hello {
	g := &listener.Hello{Service: listener.Store}
	copy(g.Fields[:], id[:])
	binary.LittleEndian.PutUint16(g.Fields[len(id):], Version)
	return g
}

// clientOf returns the client id in a hello.
func clientOf(g *listener.Hello) (id clientID, err error) {
	const rest = len(id) + 2
	if [listener.FieldsBytes - rest]byte(g.Fields[rest:]) != [listener.FieldsBytes - rest]byte{} || g.Job != [16]byte{} {
		return id, listener.Refuse(listener.Damaged, "the hello is not for a store")
	}
	if version := versionOf(int(binary.LittleEndian.Uint16(g.Fields[len(id):]))); version != Version {
		return id, listener.Refuse(listener.Versions, "it has version %d of the rendezvous, the store has version %d: run "+
			"the same version of Lockstep on all hosts", version, Version)
	}
	return clientID(g.Fields[:len(id)]), nil
}

// versionOf returns the version that a process states: version 1 stated none.
func versionOf(stated int) int { return max(stated, 1) }

// opcode is the operation of a request.
type opcode uint8

const (
	opGet opcode = 1 + iota
	opSet
	opCreate
	opSwap
	opDelete
	opList
	opChanges
	opCancel // cancels the request with that id
	opPing
	opWait
	opcodes
)

// changes reports whether an operation changes the store, and so must not be repeated.
func (o opcode) changes() bool { return o >= opSet && o <= opDelete }

// waits reports whether an operation waits, and so can be canceled.
func (o opcode) waits() bool { return o == opChanges || o == opWait }

// request is a client's request.
type request struct {
	op opcode
	id uint64 // unique per client; an operation that is sent again, on another connection, has the same
	// oldest is the lowest id of a change whose response the client still waits for; the server may discard
	// the records of those before.
	oldest   uint64
	revision uint64 // swap: expected; changes: after; wait: the number of keys
	key      string // or prefix
	token    *Token // of a change; nil: none
	value    []byte
}

// encode returns the request's frame.
func (q *request) encode() []byte {
	le := binary.LittleEndian
	n := requestBytes + len(q.key) + len(q.value)
	if q.token != nil {
		n += tokenBytes + len(q.token.Key) + len(q.token.Value)
	}
	b := make([]byte, 0, 4+n)
	b = le.AppendUint32(b, uint32(n))
	b = append(b, byte(q.op), byte(count(q.token != nil)))
	b = le.AppendUint16(b, uint16(len(q.key)))
	b = le.AppendUint64(b, q.id)
	b = le.AppendUint64(b, q.oldest)
	b = le.AppendUint64(b, q.revision)
	b = append(b, q.key...)
	if q.token != nil {
		b = le.AppendUint16(b, uint16(len(q.token.Key)))
		b = le.AppendUint16(b, uint16(len(q.token.Value)))
		b = append(b, q.token.Key...)
		b = append(b, q.token.Value...)
	}
	return append(b, q.value...)
}

// decodeToken splits the token off the bytes that follow a request's key. It returns nil if they are too short. The
// token's value aliases them.
func decodeToken(b []byte) (token *Token, rest []byte) {
	le := binary.LittleEndian
	if len(b) < tokenBytes {
		return nil, b
	}
	k, v := int(le.Uint16(b)), int(le.Uint16(b[2:]))
	if tokenBytes+k+v > len(b) {
		return nil, b
	}
	b = b[tokenBytes:]
	return &Token{string(b[:k]), b[k : k+v : k+v]}, b[k+v:]
}

// decode parses and validates the frame's body. The value aliases it.
func (q *request) decode(b []byte) error {
	le := binary.LittleEndian
	if len(b) < requestBytes {
		return listener.Refuse(listener.Frame, "a request of %d bytes, want at least %d", len(b), requestBytes)
	}
	n := int(le.Uint16(b[2:]))
	if b[0] == 0 || opcode(b[0]) >= opcodes || b[1] > 1 || requestBytes+n > len(b) {
		return listener.Refuse(listener.Frame, "a request of kind %d with a key of %d bytes, in %d", b[0], n, len(b))
	}
	*q = request{op: opcode(b[0]), id: le.Uint64(b[4:]), oldest: le.Uint64(b[12:]), revision: le.Uint64(b[20:])}
	q.key, q.value = string(b[requestBytes:requestBytes+n]), b[requestBytes+n:]
	if b[1] == 1 {
		q.token, q.value = decodeToken(q.value)
		if q.token == nil || !q.op.changes() || CheckKey(q.token.Key) != nil {
			return listener.Refuse(listener.Frame, "a request of kind %d with a wrong token", b[0])
		}
	}
	if !(q.op >= opSet && q.op <= opSwap) && len(q.value) > 0 {
		return listener.Refuse(listener.Frame, "a request of kind %d with a value", b[0])
	}
	err := CheckPrefix(q.key)
	if q.op.changes() {
		err = checkPair(q.key, q.value)
	}
	if err != nil {
		return listener.Refuse(listener.Frame, "a request with a wrong key or value: %v", err)
	}
	return nil
}

// status is the result of a request.
type status uint8

const (
	statusOK        status = iota
	statusNo               // get: no such key; create, swap: not done
	statusCompacted        // changes
	statusFull
	statusBusy    // too many concurrent requests on this connection
	statusClosing // in response to no request: the server ends, and its content is lost
	statusFenced  // a change whose token is not the current one
	statuses
)

const (
	responseBytes = 20
	entryHead     = 16       // bytes of an entry before its key
	pieceBytes    = 16 << 10 // a value of so many bytes is not copied into the response
)

// response is the server's response: as many frames as its entries need.
type response struct {
	id       uint64
	status   status
	more     bool // another frame follows
	revision uint64
	entries  []Entry // get: one with the value; create: the existing one
}

// encode returns the response's frames, in pieces to be written one after the other. A large value is a piece of its
// own, not copied: many clients may get the same at once.
func (p *response) encode() [][]byte {
	le := binary.LittleEndian
	var pieces [][]byte
	var b []byte
	for rest, first := p.entries, true; first || len(rest) > 0; first = false {
		n, bytes := frameEntries(rest)
		b = le.AppendUint32(b, uint32(responseBytes+bytes))
		b = append(b, byte(p.status), byte(count(n < len(rest))), 0, 0)
		b = le.AppendUint64(b, p.id)
		b = le.AppendUint64(b, p.revision)
		for i := range rest[:n] {
			e := &rest[i]
			b = le.AppendUint16(b, uint16(len(e.Key)))
			b = append(b, byte(count(e.Deleted)), 0)
			b = le.AppendUint32(b, uint32(len(e.Value)))
			b = le.AppendUint64(b, e.Revision)
			b = append(b, e.Key...)
			if len(e.Value) < pieceBytes {
				b = append(b, e.Value...)
				continue
			}
			pieces = append(pieces, b, e.Value)
			b = nil
		}
		rest = rest[n:]
	}
	if len(b) > 0 {
		pieces = append(pieces, b)
	}
	return pieces
}

// frameEntries returns how many entries the next frame has, and their bytes in it.
func frameEntries(entries []Entry) (n, bytes int) {
	for n < len(entries) && responseBytes+bytes < chunkBytes {
		bytes += entryHead + len(entries[n].Key) + len(entries[n].Value)
		n++
	}
	return n, bytes
}

// decode parses one frame's body. Values alias it.
func (p *response) decode(b []byte) error {
	le := binary.LittleEndian
	if len(b) < responseBytes || b[0] >= byte(statuses) || b[1] > 1 || b[2] != 0 || b[3] != 0 {
		return errors.New("the store's response is too short")
	}
	*p = response{status: status(b[0]), more: b[1] == 1, id: le.Uint64(b[4:]), revision: le.Uint64(b[12:])}
	for b = b[responseBytes:]; len(b) > 0; {
		if len(b) < entryHead {
			return errors.New("the store's response is truncated within an entry")
		}
		k, v := int(le.Uint16(b)), int64(le.Uint32(b[4:]))
		if b[2] > 1 || b[3] != 0 || int64(16+k)+v > int64(len(b)) {
			return fmt.Errorf("the store's response has an entry of %d and %d bytes, %d are left", k, v, len(b)-16)
		}
		end := 16 + k + int(v)
		p.entries = append(p.entries, Entry{
			Key: string(b[16 : 16+k]), Value: b[16+k : end : end],
			Revision: le.Uint64(b[8:]), Deleted: b[2] == 1,
		})
		b = b[end:]
	}
	return nil
}

// readFrame reads a frame's body. It does not allocate the claimed size before the data has arrived.
func readFrame(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := int64(binary.LittleEndian.Uint32(head[:]))
	if n > frameMax {
		return nil, listener.Refuse(listener.Frame, "a frame of %d bytes, want at most %d", n, frameMax)
	}
	if n <= 64<<10 {
		b := make([]byte, n)
		_, err := io.ReadFull(r, b)
		return b, err
	}
	var b []byte
	for have := int64(0); have < n; have = int64(len(b)) {
		b = append(make([]byte, 0, min(n, 4*have+32<<10)), b...)[:min(n, 4*have+32<<10)]
		if _, err := io.ReadFull(r, b[have:]); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// idleConn is a connection with an idle timeout: a read without data for so long fails, and so does a write
// without progress.
type idleConn struct {
	net.Conn
	silence time.Duration
}

func (l idleConn) Read(b []byte) (int, error) {
	l.SetReadDeadline(time.Now().Add(l.silence))
	return l.Conn.Read(b)
}

// Write writes in pieces: each has a separate deadline, so that a slow network is not mistaken for a dead
// one.
func (l idleConn) Write(b []byte) (done int, err error) {
	for err == nil && done < len(b) {
		var n int
		l.SetWriteDeadline(time.Now().Add(l.silence))
		n, err = l.Conn.Write(b[done:min(len(b), done+256<<10)])
		done += n
	}
	return done, err
}
