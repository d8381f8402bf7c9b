//go:build unix

package worker_test

import (
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// act does to this process what a test wants to happen to it.
func act(what string) {
	switch what {
	case "":
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		time.Sleep(time.Hour) // until the signal has come to all threads
	case "stop":
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		time.Sleep(time.Hour)
	case "loop":
		endless(true)
	case "sleep":
		endless(false)
	case "wait":
		fmt.Println("waits")
		_, _ = io.Copy(io.Discard, os.Stdin)
	case "exit":
		os.Exit(3)
	case "panic":
		panic("it went wrong")
	default:
		panic("no such act: " + what)
	}
}

var spins int

// endless is a loop without end. If busy, it makes no call for a second, in which nothing can preempt it but a signal;
// afterwards, and if not busy, it leaves the processors to others.
//
//go:noinline
func endless(busy bool) {
	for until := time.Now().Add(time.Second); busy && time.Now().Before(until); {
		for range 1 << 24 {
			spins++
		}
	}
	for {
		time.Sleep(time.Second)
	}
}
