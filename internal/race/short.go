package race

import "testing"

// SkipShort skips a test with -short, and prints why, unless it is built with -race. It is for tests that wait for
// seconds: .ci/run executes them without -short, and with -race.
func SkipShort(t testing.TB, why string) {
	t.Helper()
	if testing.Short() && !Enabled {
		t.Skip("-short: " + why)
	}
}

// SkipTimed skips a test with -short or -race, and prints why. It is for tests that train for seconds, or judge the
// time of steps.
func SkipTimed(t testing.TB, why string) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: " + why)
	}
	if Enabled {
		t.Skip("-race takes time that counts here: " + why)
	}
}
