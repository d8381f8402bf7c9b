package collective_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestInTurns checks that two ranks whose reduce-scatter and all-gather share the link get the same bits as those that
// exchange everything, at lengths around those at which one slice has one segment more than the other, in place and
// not.
func TestInTurns(t *testing.T) {
	t.Parallel()
	const segment = 256 << 10
	random := rand.NewChaCha8([32]byte{1})
	for _, over := range placements {
		if over.name != "pipes" && over.name != "tcp" {
			continue
		}
		t.Run(over.name, func(t *testing.T) {
			w := over.world(t, 2, collective.Config{})
			defer w.close(t)
			for _, dtype := range []tensor.DType{tensor.Float32, tensor.BFloat16} {
				for _, accumulate := range []collective.Accumulate{collective.AccumulateDType, collective.AccumulateFloat32} {
					for _, segments := range []int{1, 3, 9} {
						for _, more := range []int{-1, 1} {
							count := 2*segments*segment/dtype.Bytes() + more
							if dtype == tensor.Float32 && accumulate == collective.AccumulateFloat32 ||
								segments > 3 && (more < 1 || dtype != tensor.Float32) {
								continue
							}
							inTurns(t, w, random, dtype, accumulate, count)
						}
					}
				}
			}
		})
	}
}

// inTurns reduces the same vectors by several rows.
func inTurns(
	t *testing.T, w *world, random *rand.ChaCha8, dtype tensor.DType, accumulate collective.Accumulate, count int,
) {
	t.Helper()
	given := make([][]byte, 2)
	for r := range given {
		given[r] = make([]byte, count*dtype.Bytes())
		random.Read(given[r])
	}
	for _, op := range []collective.ReduceOp{collective.Sum, collective.Mean} {
		var want []byte
		for _, row := range []string{"recursive_doubling", "direct_frames", "rabenseifner"} {
			for _, inPlace := range []bool{false, true} {
				got := make([][]byte, 2)
				err := errors.Join(w.each(func(c collective.Communicator) error {
					src := bytes.Clone(given[c.Rank()])
					dst := src
					if !inPlace {
						dst = make([]byte, len(src))
					}
					got[c.Rank()] = dst
					call := &collective.Call{
						Op: collective.AllReduce, Reduce: op, Type: dtype, Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst),
						Options: &collective.Options{Algorithm: row, Accumulate: accumulate},
					}
					return c.Do(background, call)
				})...)
				if want == nil {
					want = got[0]
				}
				what := fmt.Sprintf("%v of %d %v by %s, in place: %v", op, count, dtype, row, inPlace)
				if err != nil || !bytes.Equal(got[0], want) || !bytes.Equal(got[1], want) {
					t.Fatalf("%s: other bits, or %v", what, err)
				}
			}
		}
	}
}
