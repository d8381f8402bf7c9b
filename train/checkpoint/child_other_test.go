//go:build !unix

package checkpoint

// childMain is for tests that kill processes, which there are on Unix only.
func childMain(string) {}
