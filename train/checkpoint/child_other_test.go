//go:build !linux && !darwin

package checkpoint

// childMain is for tests that kill processes, with the limits of these systems.
func childMain(string) {}
