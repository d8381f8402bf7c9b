//go:build !amd64 || noasm

package kernel

// levels returns the tables of all instructions that this processor has, by name.
func levels() map[string]loopTable { return map[string]loopTable{"the table": table} }
