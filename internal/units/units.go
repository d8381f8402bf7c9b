// Package units formats sizes for displays and errors.
package units

import "strconv"

// Bytes formats a size in the largest binary unit of which it has at least one: "4 B", "64 KiB", "1.5 GiB".
func Bytes(n int) string {
	x, unit := float64(n), 0
	names := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for x >= 1024 && unit < len(names)-1 {
		x, unit = x/1024, unit+1
	}
	return strconv.FormatFloat(x, 'g', 4, 64) + " " + names[unit]
}
