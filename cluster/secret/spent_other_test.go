//go:build !unix

package secret_test

// spent is not known.
func spent() string { return "0s" }
