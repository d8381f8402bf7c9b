package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/lockstep-ml/lockstep/transport/mixed"
)

// bare exchanges bytes around a ring of the processes over loopback sockets, and does nothing else: no frames, no
// additions. One goroutine sends to the next process while another receives from the one before. Two processes have one
// connection, as the ranks of a group do.
type bare struct {
	out, in net.Conn
	give    []byte
	get     []byte
	begin   chan []byte // what the sending goroutine sends next
	sent    chan error
}

// bareExchange reports whether the limit of the measurement is a bare exchange.
func (o *Options) bareExchange() bool {
	t := Transports[o.Transport]
	return t.join != nil && t.frames && o.Processes > 1
}

// openBare connects the process with its neighbours. All processes call it, with an exchange of their addresses.
func openBare(ctx context.Context, j *job, exchange mixed.Exchange) (*bare, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("bench: a bare exchange: %w", err)
	}
	defer l.Close()
	addrs, err := exchange(ctx, []byte(l.Addr().String()))
	if err != nil {
		return nil, fmt.Errorf("bench: a bare exchange: %w", err)
	}
	b := &bare{begin: make(chan []byte), sent: make(chan error)}
	n := len(addrs)
	if n > 2 || j.Process == 0 {
		b.out, err = net.Dial("tcp", string(addrs[(j.Process+1)%n]))
		b.in = b.out
	}
	if err == nil && (n > 2 || j.Process > 0) {
		l.(*net.TCPListener).SetDeadline(time.Now().Add(10 * time.Second))
		if b.in, err = l.Accept(); n == 2 {
			b.out = b.in
		}
	}
	go b.send()
	if err != nil {
		b.close()
		return nil, fmt.Errorf("bench: a bare exchange: %w", err)
	}
	return b, nil
}

// resize sets how many bytes are exchanged.
func (b *bare) resize(bytes int) {
	b.give, b.get = make([]byte, bytes), make([]byte, bytes)
	for i := range b.give {
		b.give[i] = byte(i)*7 | 1
	}
	copy(b.get, b.give) // touches it
}

func (b *bare) send() {
	for data := range b.begin {
		_, err := b.out.Write(data)
		b.sent <- err
	}
}

// exchange sends and receives the bytes.
func (b *bare) exchange() error {
	b.begin <- b.give
	_, err := io.ReadFull(b.in, b.get)
	if e := <-b.sent; err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("bench: a bare exchange: %w", err)
	}
	return nil
}

func (b *bare) close() {
	close(b.begin)
	for _, c := range []net.Conn{b.out, b.in} {
		if c != nil {
			c.Close()
		}
	}
}
