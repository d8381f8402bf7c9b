// Package ranges formats lists of numbers for errors and reports.
package ranges

import (
	"fmt"
	"strings"
)

// Text formats increasing numbers after a noun: "rank 1", "ranks 0-2, 5". An empty list is "ranks ".
func Text(noun string, list []int) string {
	if len(list) == 1 {
		return fmt.Sprintf("%s %d", noun, list[0])
	}
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		switch j - i {
		case 0:
			parts = append(parts, fmt.Sprint(list[i]))
		case 1:
			parts = append(parts, fmt.Sprintf("%d, %d", list[i], list[j]))
		default:
			parts = append(parts, fmt.Sprintf("%d-%d", list[i], list[j]))
		}
		i = j + 1
	}
	return noun + "s " + strings.Join(parts, ", ")
}
