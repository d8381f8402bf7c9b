//go:build !linux

package main

// injectFaults does nothing: the test that injects faults into processes needs Linux.
func injectFaults() {}
