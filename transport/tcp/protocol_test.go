package tcp

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	mathrand "math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/transport"
)

func FuzzHead(f *testing.F) {
	var b [headBytes]byte
	(&head{bytes: 1 << 40, number: 7, Header: transport.Header{Seq: 5, Root: -1, Order: 255}}).encode(&b)
	f.Add(b[:])
	f.Add(make([]byte, headBytes))
	f.Fuzz(func(t *testing.T, text []byte) {
		var b, back [headBytes]byte
		copy(b[:], text)
		var h head
		if err := h.decode(&b); err != nil {
			if !errors.Is(err, errFrame) {
				t.Fatalf("%v is not an errFrame", err)
			}
			// The same with a valid checksum: only the first eight bytes may be invalid.
			binary.LittleEndian.PutUint32(b[80:], crc32.Checksum(b[:80], castagnoli))
			if err := h.decode(&b); err != nil {
				if binary.LittleEndian.Uint64(b[:])&^(1<<(8*checkedAt)) == frameMark {
					t.Fatalf("a valid head is refused: %v", err)
				}
				return
			}
		}
		if h.encode(&back); back != b {
			t.Fatalf("% x decodes to %+v, and that encodes to % x", b, h, back)
		}
	})
}

func FuzzHello(f *testing.F) {
	own := (&hello{world: 3, group: 4, members: 5, epoch: 6, from: 7, to: 8}).message().Fields
	f.Add(own[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		g := listener.Hello{Service: listener.Data, Secure: true}
		copy(g.Fields[:], b)
		var h hello
		if err := h.decode(&g); err != nil {
			if r := (*listener.Refusal)(nil); !errors.As(err, &r) {
				t.Fatalf("%v is not a refusal", err)
			}
			return
		}
		if again := h.message(); *again != g {
			t.Fatalf("%+v is decoded as %+v", g, again)
		}
	})
}

func FuzzMessage(f *testing.F) {
	f.Add((&message{kind: msgFailed, from: 1, group: 2, text: []byte("why")}).append(nil))
	f.Add((&message{kind: msgAnswer, known: true, tag: 4, to: 3, seq: 9}).append(nil))
	f.Add((&message{kind: msgLost, tag: hopsMax, from: 1, to: 1<<32 - 1, text: []byte("gone")}).append(nil))
	f.Add((&message{kind: msgReady}).append((&message{kind: msgOpen}).append(nil)))
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			var m message
			n, err := m.split(b)
			if err != nil || n > len(b) {
				return
			}
			if back := m.append(nil); !bytes.Equal(back, b[:n]) {
				t.Fatalf("%+v encodes to % x, was received as % x", m, back, b[:n])
			}
			b = b[n:]
		}
	})
}

// scripted is a wire from which bytes can be read, in pieces of the given sizes; 0: nothing at that moment.
type scripted struct {
	wire
	b      []byte
	pieces []byte
}

func (s *scripted) read(a, b []byte) (int, error) {
	if len(s.b) == 0 {
		return 0, io.EOF
	}
	n := len(s.b)
	if len(s.pieces) > 0 {
		n = int(s.pieces[0]) * 3
		s.pieces = s.pieces[1:]
	}
	n = min(n, len(s.b), len(a)+len(b))
	if n == 0 {
		return 0, errAgain
	}
	copy(b, s.b[copy(a, s.b[:n]):n])
	s.b = s.b[n:]
	return n, nil
}

// FuzzStream: for any data in any pieces, the receiver returns exactly the frames that a reader of the whole data
// finds.
func FuzzStream(f *testing.F) {
	frame := func(number uint64, data []byte) []byte { return frameOf(number, data, false) }
	big := make([]byte, smallBytes+5)
	rand.Read(big)
	two := append(frame(0, []byte("abc")), frame(1, nil)...)
	f.Add(two, []byte{1, 0, 200, 3})
	f.Add(append(two, frame(2, big)...), []byte{255, 255, 1})
	f.Add(append(two, frameOf(2, big, true)...), []byte{255, 255, 1})
	// the next head arrives with the data
	f.Add(append(append(frame(0, big), frame(1, big)...), frame(2, big)...), []byte{})
	f.Add(append(two, frame(2, big)[:1000]...), []byte{})
	f.Add(append(two, "garbage that is long enough to be taken for the head of a frame, which it is not, at all"...),
		[]byte{90})
	f.Fuzz(func(t *testing.T, text, pieces []byte) {
		s := &stream{w: &scripted{b: text, pieces: pieces}}
		rest := text
		for {
			var want head
			var b [headBytes]byte
			wanted, damaged := len(rest) >= headBytes, false
			if wanted {
				copy(b[:], rest)
				wanted = want.decode(&b) == nil && want.bytes <= uint64(len(rest)-headBytes)
				damaged = wanted && want.checked && crc32.Checksum(rest[headBytes:][:want.bytes], castagnoli) != want.sum
			}
			ok, err := until(func() (bool, error) { return s.next() })
			if !ok {
				if wanted {
					t.Fatalf("a frame of %d bytes is not found: %v", want.bytes, err)
				}
				return
			}
			if s.head.bytes > uint64(len(text)) {
				return // the rank would refuse it by its size
			}
			in := make([]byte, s.head.bytes)
			ok, err = until(func() (bool, error) { return s.take(in) })
			if ok != (wanted && !damaged) || damaged && !errors.Is(err, errFrame) {
				t.Fatalf("frame %+v: taken is %v (%v), want %v (damaged: %v)", s.head, ok, err, wanted, damaged)
			}
			if !ok {
				return
			}
			rest = rest[headBytes:]
			if !bytes.Equal(in, rest[:len(in)]) {
				t.Fatalf("the data differs")
			}
			rest = rest[len(in):]
		}
	})
}

// frameOf returns a frame, with a checksum of its data if it is checked.
func frameOf(number uint64, data []byte, checked bool) []byte {
	var b [headBytes]byte
	h := head{bytes: uint64(len(data)), number: number, checked: checked}
	if checked {
		h.sum = crc32.Checksum(data, castagnoli)
	}
	h.encode(&b)
	return append(b[:], data...)
}

// TestFlippedBits: a flipped bit anywhere in a frame with a checksum of its data is found, in whatever pieces the frame
// arrives.
func TestFlippedBits(t *testing.T) {
	r := mathrand.New(mathrand.NewPCG(1, 2))
	for i := range 1000 {
		data, pieces := make([]byte, r.IntN(3*smallBytes)), make([]byte, r.IntN(200))
		rand.Read(data)
		rand.Read(pieces)
		text := frameOf(0, data, true)
		bit := r.IntN(8 * len(text))
		text[bit/8] ^= 1 << (bit % 8)
		s := &stream{w: &scripted{b: text, pieces: pieces}}
		ok, err := until(s.next)
		if ok && s.head.bytes == uint64(len(data)) {
			in := make([]byte, len(data))
			ok, err = until(func() (bool, error) { return s.take(in) })
		}
		if ok || !errors.Is(err, errFrame) {
			t.Fatalf("frame %d of %d bytes: bit %d is flipped, and it is received (%v)", i, len(data), bit, err)
		}
	}
}

// until repeats a call while it would block.
func until(f func() (bool, error)) (bool, error) {
	for range 1 << 20 {
		if ok, err := f(); ok || err != nil {
			return ok, err
		}
	}
	return false, errors.New("no end")
}

func TestRing(t *testing.T) {
	r := ring{b: make([]byte, 7)}
	var put, got []byte
	next := byte(0)
	for i := range 1000 {
		in := make([]byte, i%11)
		for j := range in {
			in[j] = next + byte(j)
		}
		n := r.put(in)
		next += byte(n)
		put = append(put, in[:n]...)
		out := make([]byte, i%5)
		got = append(got, out[:r.get(out)]...)
	}
	if !bytes.HasPrefix(put, got) || len(put)-len(got) != r.n || len(got) < 1000 {
		t.Errorf("put %d bytes, got %d, %d are left", len(put), len(got), r.n)
	}
}

// TestPage: docs/wire.md has the correct lengths.
func TestPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/wire.md")
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Join(strings.Fields(string(text)), " ") // the page is wrapped
	want := []string{
		fmt.Sprintf("a head of %d bytes, then the data", headBytes),
		fmt.Sprintf("a head of %d bytes, then at most 4,096 bytes of text", messageBytes),
	}
	for _, w := range want {
		if !strings.Contains(words, w) {
			t.Errorf("docs/wire.md does not have %q", w)
		}
	}
}
