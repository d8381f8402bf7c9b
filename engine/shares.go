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
	return shareAmong(parameters, make([]int, n), divide)
}

// shareAmong is Shares among shards that have so many bytes of other parameters, to which it adds: of shards with
// equally few bytes of these parameters, the one with the fewest in all counts.
func shareAmong(parameters []Variable, all []int, divide bool) []Share {
	n := len(all)
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
				if bytes[k] < bytes[least] || bytes[k] == bytes[least] && all[k] < all[least] {
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
			all[least] += (to - from) * each
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

// BucketShares is [Shares] of the parameters of each bucket if divide is set, so that each link has about the same
// number of bytes to carry while a bucket is reduced to its owners. Otherwise it is Shares of all.
func BucketShares(parameters []Variable, buckets []Bucket, n int, divide bool) []Share {
	if !divide {
		return Shares(parameters, n, false)
	}
	var list []Share
	all := make([]int, n)
	for _, b := range buckets {
		of := make([]Variable, len(b.Parameters))
		for k, i := range b.Parameters {
			of[k] = parameters[i]
		}
		for _, s := range shareAmong(of, all, true) {
			s.Parameter = b.Parameters[s.Parameter]
			list = append(list, s)
		}
	}
	slices.SortStableFunc(list, func(a, b Share) int { return a.Parameter - b.Parameter })
	return list
}
