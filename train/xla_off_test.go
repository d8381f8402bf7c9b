//go:build !(xla && cgo)

package train_test

const builtWithXLA = false
