//go:build !noasm

package kernel

import "testing"

// levels returns the tables of all instructions that this processor has, by name.
func levels() map[string]loopTable {
	generic := loopTable{Sum: genericLoops(Sum), Prod: genericLoops(Prod), Min: genericLoops(Min), Max: genericLoops(Max)}
	all := map[string]loopTable{"the table": table}
	if hasAVX2 {
		all["AVX2"] = replaced(generic, avx2Loops, avx2Bytes, hasF16C)
	}
	if hasAVX512 {
		all["AVX-512"] = replaced(generic, avx512Loops, avx512Bytes, true)
	}
	return all
}

// TestWithoutAVX512 runs the tests of what is not in the table with the instructions that more processors have.
func TestWithoutAVX512(t *testing.T) {
	if !hasAVX512 {
		t.Skip("this processor has no AVX-512: all tests run without it")
	}
	hasAVX512 = false
	defer func() { hasAVX512 = true }()
	if Level() != "AVX2" {
		t.Errorf("the level is %s", Level())
	}
	t.Run("scale", TestScale)
	t.Run("convert", TestConvertAll)
	t.Run("stream", TestStream)
	t.Run("vector loops", TestVectorLoops)
	t.Run("squares", TestSquares)
	t.Run("scale by", TestScaleBy)
	t.Run("multiply", TestMultiply)
	if !testing.Short() {
		t.Run("tree", TestTree)
	}
}
