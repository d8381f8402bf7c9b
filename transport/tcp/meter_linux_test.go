package tcp_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// TestMeter sends frames between two hosts, whose addresses are both on loopback, and within one host.
func TestMeter(t *testing.T) {
	for _, hosts := range []int{1, 2} {
		meters := make([]tcp.Meter, 2)
		ends := opened(t, 2, 2, func(p int) tcp.Config {
			return tcp.Config{Meter: &meters[p], Listen: []string{"127.0.0.1:0", "127.0.0.2:0"}[p*(hosts-1)]}
		})
		const bytes, late = 1 << 20, 20 * time.Millisecond
		done := make(chan error, 1)
		go func() {
			for !tcp.Parked(ends[1]) { // it has begun to wait
				time.Sleep(time.Millisecond)
			}
			time.Sleep(late)
			done <- ends[0].Exchange(context.Background(), 1, transport.Frame{Data: make([]byte, bytes)}, -1, nil)
		}()
		in := make([]byte, bytes)
		if err := errors.Join(ends[1].Exchange(context.Background(), -1, transport.Frame{}, 0, in), <-done); err != nil {
			t.Fatal(err)
		}
		var sent tcp.Traffic
		read := func() {
			for _, x := range meters[0].Read(nil) {
				if x.Rank != 1 {
					t.Errorf("%d hosts: worker 0 has sent to %d", hosts, x.Rank)
				}
				sent.Bytes += x.Bytes
				sent.Sending += x.Sending
				sent.Receiving += x.Receiving
			}
		}
		read()
		for since := time.Now(); hosts == 2 && sent.Bytes < bytes && time.Since(since) < time.Minute; read() {
			time.Sleep(time.Millisecond) // until the rest is acknowledged
		}
		got := meters[1].Read(nil)
		if hosts == 1 {
			if sent != (tcp.Traffic{}) || len(got) > 0 {
				t.Errorf("traffic within a host: %+v, %+v", sent, got)
			}
			continue
		}
		if sent.Bytes < bytes || sent.Bytes > bytes+1000 || sent.Receiving != 0 {
			t.Errorf("the sender has %+v: want %d bytes and some", sent, bytes)
		}
		if len(got) != 1 || got[0].Rank != 0 || got[0].Receiving < late {
			t.Errorf("the receiver has %+v: want %v of receiving from rank 0", got, late)
		}
		list := make([]tcp.Traffic, 0, 1)
		if n := testing.AllocsPerRun(10, func() { list = meters[0].Read(list[:0]) }); n > 0 || len(list) > 0 {
			t.Errorf("reading allocates %v objects, and finds %v without traffic", n, list)
		}
		for _, e := range ends {
			e.Close()
		}
	}
}

// TestMeterLateReader: bytes that the peer acknowledges long after they were sent, when it begins to read, are counted.
func TestMeterLateReader(t *testing.T) {
	meters := make([]tcp.Meter, 2)
	ends := opened(t, 2, 2, func(p int) tcp.Config {
		return tcp.Config{Meter: &meters[p], Listen: []string{"127.0.0.1:0", "127.0.0.2:0"}[p]}
	})
	const bytes = 128 << 10 // more than the receive window before the first read
	done := make(chan error, 1)
	go func() {
		done <- ends[0].Exchange(context.Background(), 1, transport.Frame{Data: make([]byte, bytes)}, -1, nil)
	}()
	var sent int64
	read := func() {
		for _, x := range meters[0].Read(nil) {
			sent += x.Bytes
		}
		time.Sleep(time.Millisecond)
	}
	for sent == 0 {
		read()
	}
	for range 5 {
		read()
	}
	if err := errors.Join(ends[1].Exchange(context.Background(), -1, transport.Frame{}, 0, make([]byte, bytes)),
		<-done); err != nil {
		t.Fatal(err)
	}
	for since := time.Now(); sent < bytes && time.Since(since) < time.Minute; {
		read()
	}
	if sent < bytes {
		t.Errorf("%d acknowledged bytes are counted, want at least %d", sent, bytes)
	}
	for _, e := range ends {
		e.Close()
	}
}

// BenchmarkMeter measures the reading of a connection that has sent a frame, as at the end of each step.
func BenchmarkMeter(b *testing.B) {
	meters := make([]tcp.Meter, 2)
	ends := opened(b, 2, 2, func(p int) tcp.Config {
		return tcp.Config{Meter: &meters[p], Listen: []string{"127.0.0.1:0", "127.0.0.2:0"}[p]}
	})
	var list []tcp.Traffic
	in := make([]byte, 64)
	for b.Loop() {
		b.StopTimer()
		sent := make(chan error, 1)
		go func() {
			sent <- ends[0].Exchange(context.Background(), 1, transport.Frame{Data: make([]byte, 64)}, -1, nil)
		}()
		if err := errors.Join(ends[1].Exchange(context.Background(), -1, transport.Frame{}, 0, in), <-sent); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		list = meters[0].Read(list[:0])
	}
}
