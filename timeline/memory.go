package timeline

import (
	"fmt"
	"os"
)

// residentBytes returns the memory of this process that is resident, or 0 without Linux' /proc.
func residentBytes() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var total, resident int64
	if n, _ := fmt.Sscan(string(text), &total, &resident); n != 2 {
		return 0
	}
	return resident * int64(os.Getpagesize())
}
