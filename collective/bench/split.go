package bench

import (
	"fmt"
	"strconv"
	"strings"
)

// Split specifies how the ranks are divided into groups, which make the same calls at the same time (nccl-tests:
// NCCL_TESTS_SPLIT). The zero value is one group of all ranks.
type Split struct {
	By string // "mod" or "div", or empty
	N  int    // at least 1
}

// ParseSplit reads mod:N, which joins the ranks that are equal modulo N, or div:N, which joins N consecutive ranks. The
// empty text is one group.
func ParseSplit(text string) (Split, error) {
	if text == "" {
		return Split{}, nil
	}
	by, number, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(number)
	if by != "mod" && by != "div" || err != nil || n < 1 {
		return Split{}, fmt.Errorf("%q is not a division of the ranks: want mod:N (ranks that are equal modulo N form a "+
			"group) or div:N (N consecutive ranks do)", text)
	}
	return Split{by, n}, nil
}

// String returns the text that [ParseSplit] reads.
func (s Split) String() string {
	if s.By == "" {
		return ""
	}
	return s.By + ":" + strconv.Itoa(s.N)
}

// color returns the number of a rank's group.
func (s Split) color(rank int) int {
	switch s.By {
	case "mod":
		return rank % s.N
	case "div":
		return rank / s.N
	}
	return 0
}

// Sizes returns the number of ranks of each group; the first group has rank 0.
func (s Split) Sizes(ranks int) []int {
	var sizes []int
	for rank := range ranks {
		c := s.color(rank)
		if c == len(sizes) {
			sizes = append(sizes, 0)
		}
		sizes[c]++
	}
	return sizes
}
