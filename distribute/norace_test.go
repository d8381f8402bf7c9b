//go:build !race

package distribute_test

const raceEnabled = false
