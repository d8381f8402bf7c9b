//go:build unix

package secret_test

import (
	"syscall"
	"time"
)

// spent returns the processor time that this process has spent.
func spent() string {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).String()
}
