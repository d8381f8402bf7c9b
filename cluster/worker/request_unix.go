//go:build unix

package worker

import (
	"os"
	"os/signal"
	"syscall"
)

// requests returns a channel that receives a value when this process is asked for its flight records, by
// SIGUSR1.
func requests() (asked <-chan os.Signal, stop func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	return signals, func() { signal.Stop(signals) }
}
