//go:build !race

package packing_test

const raceEnabled = false
