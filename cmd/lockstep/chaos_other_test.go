//go:build !linux

package main

// expectMisfortune does nothing: the test that has things happen to processes needs what Linux tells of them.
func expectMisfortune() {}
