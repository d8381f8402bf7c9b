// Package race tells tests whether they are built with -race, which makes them slow and lets them allocate, and skips
// tests that are too slow for -short alone.
package race
