//go:build unix

package main

import "golang.org/x/sys/unix"

// inForeground reports whether this process belongs to the foreground process group of a terminal, or the terminal has
// none, since it is not the one that controls this process.
func inForeground(terminal int) bool {
	group, err := unix.IoctlGetInt(terminal, unix.TIOCGPGRP)
	return err != nil || group == unix.Getpgrp()
}
