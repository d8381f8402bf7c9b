package engine

import (
	"slices"
)

// Share is a range of a parameter's elements that one shard updates.
type Share struct {
	Parameter int
	From, To  int // elements: from From up to To
	Owner     int // the shard
}

// ShareElements is the unit of shares: From is a multiple of it, and To too, unless it is the end of the parameter. So
// a range begins where a vector of any processor, and a block of a sum of squares, does.
const ShareElements = 4096

// Shares divides the elements of the parameters among n shards of about the same number of bytes. In the order of
// their sizes, largest first, each parameter goes to the shard with the fewest bytes. If divide is set, a parameter of
// more than 1/16 of a shard is cut, at powers of two times [ShareElements], where a shard is full, so every shard has
// at most 17/16 of its share, if that is at least 16 times ShareElements. A shard has at most one range of a
// parameter. Of equal ones the first counts. The result is sorted by parameter, then by elements, and the same in every
// process.
func Shares(parameters []Variable, n int, divide bool) []Share {
	order := make([]int, len(parameters))
	total := 0
	for i, v := range parameters {
		order[i] = i
		total += v.Bytes()
	}
	slices.SortStableFunc(order, func(a, b int) int { return parameters[b].Bytes() - parameters[a].Bytes() })
	full, most := (total+n-1)/n, total/n/16
	bytes := make([]int, n)
	var list []Share
	for _, i := range order {
		each := max(1, parameters[i].DType.Bytes()) // 0: an unknown type, whose parameter stays whole
		elements := parameters[i].Bytes() / each
		unit := ShareElements
		for 2*unit*each <= most {
			unit *= 2
		}
		for from := 0; from < elements || from == 0; {
			least := 0
			for k := range bytes {
				if bytes[k] < bytes[least] {
					least = k
				}
			}
			to := elements
			if divide && n > 1 && elements*each > most {
				fit := (full - bytes[least] + unit*each - 1) / (unit * each) // units until the shard is full
				to = min(elements, from+max(1, fit)*unit)
			}
			list = append(list, Share{i, from, to, least})
			bytes[least] += (to - from) * each
			if from = to; elements == 0 {
				break
			}
		}
	}
	slices.SortFunc(list, func(a, b Share) int {
		if a.Parameter != b.Parameter {
			return a.Parameter - b.Parameter
		}
		return a.From - b.From
	})
	return list
}
