// Package race tells tests whether they are built with -race, which makes them slow and lets them allocate.
package race
