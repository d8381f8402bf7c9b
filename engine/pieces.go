package engine

import (
	"cmp"
	"slices"
)

// Piece is a range of a parameter's elements that one shard updates.
type Piece struct {
	Parameter int
	From, To  int // elements: from From up to To
	Owner     int // the shard
}

// PieceElements is the unit of pieces: From is a multiple of it, and To too, unless it is the end of the parameter. So
// a range begins where a vector of any processor, and a block of a sum of squares, does.
const PieceElements = 4096

// Pieces divides the elements of the parameters among n shards of about the same number of bytes. In the order of
// their sizes, largest first, each parameter goes to the shard with the fewest bytes. If divide is set, a parameter of
// more than 1/16 of a shard is cut, at powers of two times [PieceElements], where a shard is full, so every shard has
// at most 17/16 of its part, if that is at least 16 times PieceElements. A shard has at most one range of a
// parameter. Of equal ones the first counts. The result is sorted by parameter, then by elements, and the same in every
// process.
func Pieces(parameters []Variable, n int, divide bool) []Piece {
	return divideAmong(parameters, make([]int, n), divide)
}

// divideAmong is Pieces among shards that have so many bytes of other parameters, to which it adds: of shards with
// equally few bytes of these parameters, the one with the fewest in all counts.
func divideAmong(parameters []Variable, all []int, divide bool) []Piece {
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
	var list []Piece
	for _, i := range order {
		each := max(1, parameters[i].DType.Bytes()) // 0: an unknown type, whose parameter stays whole
		elements := parameters[i].Bytes() / each
		unit := PieceElements
		for 2*unit*each <= most {
			unit *= 2
		}
		for from := 0; from < elements || from == 0; {
			least := 0
			for k := range bytes {
				if cmp.Or(cmp.Compare(bytes[k], bytes[least]), cmp.Compare(all[k], all[least])) < 0 {
					least = k
				}
			}
			to := elements
			if divide && n > 1 && elements*each > most {
				fit := (full - bytes[least] + unit*each - 1) / (unit * each) // units until the shard is full
				to = min(elements, from+max(1, fit)*unit)
			}
			list = append(list, Piece{i, from, to, least})
			bytes[least] += (to - from) * each
			all[least] += (to - from) * each
			if from = to; elements == 0 {
				break
			}
		}
	}
	slices.SortFunc(list, func(a, b Piece) int {
		return cmp.Or(a.Parameter-b.Parameter, a.From-b.From)
	})
	return list
}

// BucketPieces is [Pieces] of the parameters of each bucket if divide is set, so that each link has about the same
// number of bytes to carry while a bucket is reduced to its owners. Otherwise it is Pieces of all.
func BucketPieces(parameters []Variable, buckets []Bucket, n int, divide bool) []Piece {
	if !divide {
		return Pieces(parameters, n, false)
	}
	var list []Piece
	all := make([]int, n)
	for _, b := range buckets {
		of := make([]Variable, len(b.Parameters))
		for k, i := range b.Parameters {
			of[k] = parameters[i]
		}
		for _, s := range divideAmong(of, all, true) {
			s.Parameter = b.Parameters[s.Parameter]
			list = append(list, s)
		}
	}
	slices.SortStableFunc(list, func(a, b Piece) int { return a.Parameter - b.Parameter })
	return list
}
