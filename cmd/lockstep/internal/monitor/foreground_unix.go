//go:build unix

package monitor

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// inForeground reports whether this process belongs to the foreground process group of a terminal, or the terminal has
// none, since it is not the one that controls this process.
func inForeground(terminal int) bool {
	group, err := unix.IoctlGetInt(terminal, unix.TIOCGPGRP)
	return err != nil || group == unix.Getpgrp()
}

// notifyContinued returns a channel that receives when the process continues after it was suspended.
func notifyContinued() <-chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGCONT)
	return c
}
