//go:build !linux && !darwin

package checkpoint

// childMain is for tests that kill processes. These systems do not support it.
func childMain(string) {}
