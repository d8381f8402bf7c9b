//go:build !unix

package monitor

import "os"

// notifyContinued returns nil: this system does not suspend processes.
func notifyContinued() <-chan os.Signal { return nil }

// inForeground reports that the terminal is this process's: this system has no background processes of a terminal.
func inForeground(int) bool { return true }
