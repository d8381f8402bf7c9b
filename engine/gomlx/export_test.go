package gomlx

// Staged returns options for an engine that copies between host and device memory although it need not.
func Staged(o XLAOptions) XLAOptions {
	o.staged = true
	return o
}
