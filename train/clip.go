package train

import (
	"fmt"
	"math"
	"math/bits"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// normMetric is the name of the gradients' global norm in a [Result] of training with Config.ClipNorm.
const normMetric = "gradient_norm"

// normBlock is the number of elements whose squares are added at once. It is part of the definition of the norm:
// another number gives other bits.
const normBlock = 4096

// GlobalNorm returns the square root of the sum of the squares of all elements, as tf.linalg.global_norm does.
// It adds in float64 in a fixed order: every tensor in blocks of 4,096 elements, the blocks in a tree, then the
// tensors in their order. The tensors are floating-point numbers in host memory.
func GlobalNorm(tensors []*tensor.Tensor) float64 {
	total := 0.0
	for _, x := range tensors {
		sums := make([]float64, normBlocks(x.Len()))
		for i := range sums {
			sums[i] = blockSquares(x, i)
		}
		total += treeSum(sums)
	}
	return math.Sqrt(total)
}

// ClipByGlobalNorm multiplies the tensors by limit/norm if their [GlobalNorm] is more than limit, as
// tf.clip_by_global_norm does, and returns the norm before. It is for training loops of [Trainer.Gradients]
// and [Trainer.ApplyGradients] that clip by a limit that changes; a constant one is Config.ClipNorm.
func ClipByGlobalNorm(tensors []*tensor.Tensor, limit float64) (norm float64) {
	norm = GlobalNorm(tensors)
	if factor := clipFactor(norm, limit); factor != 1 {
		for _, x := range tensors {
			scale(x, factor)
		}
	}
	return norm
}

// clipFactor returns the factor that reduces a norm to the limit. It is NaN for a norm that is not finite.
func clipFactor(norm, limit float64) float64 {
	switch {
	case !finite(norm):
		return math.NaN()
	case norm > limit:
		return limit / norm
	}
	return 1
}

func normBlocks(elements int) int { return ceilDiv(elements, normBlock) }

// blockSquares returns the sum of the squares of one block of a tensor.
func blockSquares(x *tensor.Tensor, block int) float64 {
	lo := block * normBlock
	n := min(x.Len()-lo, normBlock)
	return kernel.Squares(x.DType(), unsafe.Pointer(&x.Memory().HostBytes()[lo*x.DType().Bytes()]), n)
}

// treeSum adds numbers in pairs: the first half, of a power of two, and the rest.
func treeSum(x []float64) float64 {
	switch len(x) {
	case 0:
		return 0
	case 1:
		return x[0]
	}
	half := 1 << (bits.Len(uint(len(x)-1)) - 1)
	return treeSum(x[:half]) + treeSum(x[half:])
}

// checkClipping returns an error if the limits are invalid.
func (c *Config) checkClipping() error {
	set := 0
	for _, limit := range []struct {
		name  string
		value float64
	}{{"ClipNorm", c.ClipNorm}, {"ClipVariableNorm", c.ClipVariableNorm}, {"ClipValue", c.ClipValue}} {
		if !(limit.value >= 0) || math.IsInf(limit.value, 1) {
			return fmt.Errorf("train: Config.%s is %v: want a positive number, or 0 for no limit", limit.name, limit.value)
		}
		if limit.value > 0 {
			set++
		}
	}
	if set > 1 {
		return fmt.Errorf("train: Config has ClipNorm %v, ClipVariableNorm %v and ClipValue %v: set only one of them",
			c.ClipNorm, c.ClipVariableNorm, c.ClipValue)
	}
	return nil
}

// clips reports whether the gradients are clipped.
func (c *Config) clips() bool { return c.needsNorm() || c.ClipValue > 0 }

// needsNorm reports whether the gradients are clipped by a norm, which is known only once all are reduced.
func (c *Config) needsNorm() bool { return c.ClipNorm > 0 || c.ClipVariableNorm > 0 }

// needsSquares reports whether the squares of the gradients are added up.
func (c *Config) needsSquares() bool { return c.needsNorm() || c.NoiseScale }

// globalNorm returns the norm of the step's gradients, of which the local replicas have added the squares.
func (t *Trainer) globalNorm() float64 {
	total := 0.0
	for _, sums := range t.squares {
		total += treeSum(sums)
	}
	return math.Sqrt(total)
}

// notFiniteNorm names a norm that the gradients are clipped by and that is not finite, or returns "". It can overflow
// though all elements are finite.
func (t *Trainer) notFiniteNorm() string {
	switch {
	case t.config.ClipNorm > 0 && !finite(t.globalNorm()):
		return "the gradients' norm"
	case t.config.ClipVariableNorm > 0:
		for parameter, sums := range t.squares {
			if !finite(treeSum(sums)) {
				return "the norm of the gradient of " + t.Parameters()[parameter].Name
			}
		}
	}
	return ""
}

// clip applies the limits to the gradients of a bucket in their memory, except for Config.ClipNorm, whose factor it
// returns.
func (t *Trainer) clip(gradients []*tensor.Tensor, parameters []int) (factor float64) {
	c := &t.config
	for i, x := range gradients {
		switch {
		case x == nil: // another replica owns it
		case c.ClipValue > 0:
			clamp(x, c.ClipValue)
		case c.ClipVariableNorm > 0:
			if f := clipFactor(math.Sqrt(treeSum(t.squares[parameters[i]])), c.ClipVariableNorm); f != 1 {
				scale(x, f)
			}
		}
	}
	if c.ClipNorm > 0 {
		return clipFactor(t.globalNorm(), c.ClipNorm)
	}
	return 1
}

// scale multiplies all elements by a factor.
func scale(x *tensor.Tensor, factor float64) {
	kernel.Multiply(x.DType(), x.Memory().Ptr, x.Len(), factor)
}

// clamp limits all elements to [-limit, limit]. A NaN stays one.
func clamp(x *tensor.Tensor, limit float64) {
	switch x.DType() {
	case tensor.Float16:
		list := tensor.Data[tensor.F16](x)
		for i, v := range list {
			list[i] = tensor.F16From(within(v.Float32(), float32(limit)))
		}
	case tensor.BFloat16:
		list := tensor.Data[tensor.BF16](x)
		for i, v := range list {
			list[i] = tensor.BF16From(within(v.Float32(), float32(limit)))
		}
	case tensor.Float32:
		list := tensor.Data[float32](x)
		for i, v := range list {
			list[i] = within(v, float32(limit))
		}
	case tensor.Float64:
		list := tensor.Data[float64](x)
		for i, v := range list {
			list[i] = within(v, limit)
		}
	}
}

func within[T float32 | float64](x, limit T) T { return max(-limit, min(x, limit)) }
