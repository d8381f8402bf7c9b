package main

import (
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// startOn starts a process on the n-th of the processors that this process may use, modulo their number. Its threads
// stay there. If the system does not allow that, it starts on any.
func startOn(n int, cmd *exec.Cmd) error {
	var all, one unix.CPUSet
	if unix.SchedGetaffinity(0, &all) != nil || all.Count() == 0 {
		return cmd.Start()
	}
	n %= all.Count()
	for cpu := 0; ; cpu++ {
		if !all.IsSet(cpu) {
			continue
		}
		if n--; n < 0 {
			one.Set(cpu)
			break
		}
	}
	runtime.LockOSThread() // a new process has the processors of the thread that starts it
	defer runtime.UnlockOSThread()
	if unix.SchedSetaffinity(0, &one) != nil {
		return cmd.Start()
	}
	err := cmd.Start()
	if unix.SchedSetaffinity(0, &all) != nil {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, or serves it alone
	}
	return err
}
