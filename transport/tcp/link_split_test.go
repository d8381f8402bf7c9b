package tcp

import (
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
)

// FuzzSplitReads: however a connection delivers its bytes, the reader of a link handles the same messages and ends with
// the same error as one that gets them at once.
func FuzzSplitReads(f *testing.F) {
	lost := (&message{kind: msgLost, from: 1, to: 2, text: []byte("its host cannot be reached")}).append(nil)
	long := (&message{kind: msgFailed, group: 7, text: make([]byte, 4096)}).append(nil)
	bye := (&message{kind: msgBye}).append(nil)
	f.Add(slices.Concat(lost, long, lost, bye, lost), []byte{1, 39, 40, 255})
	f.Add(slices.Concat(lost, bye[:20]), []byte{0, 66})
	f.Add(slices.Concat(long, lost, []byte("these forty bytes are not the head of a message")), []byte{3, 2, 1})
	f.Fuzz(func(t *testing.T, b, sizes []byte) {
		whole, wantErr := received(b, []byte{255, 255})
		var bytewise []byte
		random := rand.New(rand.NewPCG(uint64(len(b)), 0))
		for range len(sizes) {
			bytewise = append(bytewise, byte(random.IntN(3)))
		}
		for _, pieces := range [][]byte{sizes, {0}, bytewise} {
			got, err := received(b, pieces)
			if !slices.Equal(got, whole) {
				t.Fatalf("in pieces of % x: %d messages, want %d", pieces, len(got), len(whole))
			}
			if !errors.Is(err, wantErr) && err.Error() != wantErr.Error() {
				t.Fatalf("in pieces of % x: it ends with %v, want %v", pieces, err, wantErr)
			}
		}
	})
}

// received passes b to the reader of a link, as a connection that delivers it in pieces of these sizes plus one, again
// and again. It returns the encoded messages, and the error that ends the connection.
func received(b, sizes []byte) (messages []string, err error) {
	l := &link{open: true}
	handle := func(m *message) { messages = append(messages, string(m.append(nil))) }
	in := make([]byte, 0, readAhead)
	for i := 0; ; i++ {
		n := 0
		if len(b) > 0 {
			size := 1
			if len(sizes) > 0 {
				size += int(sizes[i%len(sizes)])
			}
			n = copy(in[len(in):cap(in)], b[:min(size, len(b))])
		} else {
			err = io.EOF
		}
		b = b[n:]
		if in, err = l.received(in[:len(in)+n], err, handle); err != nil {
			return messages, err
		}
	}
}
