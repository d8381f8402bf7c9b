package kinds

import (
	"fmt"
	"log"
	"strconv"
	"strings"
)

// Loop is the declaration of a loop in assembly.
type Loop struct {
	Name      string // without a suffix
	Signature string // "func(dst, src *byte, bytes int)"
	doc       string // with NAME and BYTES
}

// Doc returns the lines of the doc comment of the loop with a suffix, which handles a multiple of so many bytes.
func (l Loop) Doc(suffix string, bytes int) []string {
	doc := strings.NewReplacer("NAME", l.Name+suffix, "BYTES", strconv.Itoa(bytes)).Replace(l.doc)
	return strings.Split(doc, "\n")
}

// Reduce is the loop over n sources, with these parameters.
func (k Kind) Reduce(n int) (loop Loop, sources []string) {
	sources = []string{"a", "b", "c", "d"}[:n]
	return Loop{
		fmt.Sprintf("%sx%d", k.Name(), n),
		"func(dst, " + strings.Join(sources, ", ") + " *byte, bytes int)",
		"NAME sets dst[i] = " + expression(k.Doc, n) + " for so many bytes, a multiple of BYTES.",
	}, sources
}

// By is the loop over a vector and one number, the right operand.
func (k Kind) By() Loop {
	return Loop{
		k.Name() + "By", "func(dst, src, by *byte, bytes int)",
		"NAME sets dst[i] = " + fmt.Sprintf(k.Doc, "src[i]", "*by") + " for so many bytes, a multiple of BYTES.",
	}
}

// Named returns the declaration of another loop.
func Named(name string) Loop {
	for _, l := range named {
		if l.Name == name {
			return l
		}
	}
	log.Fatalf("no loop is named %s", name)
	return Loop{}
}

const (
	conversion = "func(dst, src *byte, bytes int)"
	halves     = ", for so many bytes of half-width elements, a multiple of BYTES."
)

var named = []Loop{
	{"widenBF16", conversion, "NAME sets dst[i] = float32 of src[i], which is BF16" + halves},
	{"widenF16", conversion, "NAME sets dst[i] = float32 of src[i], which is F16" + halves},
	{"narrowBF16", conversion, "NAME sets dst[i] = BF16 of src[i], which is float32, rounded to nearest even" + halves},
	{"narrowF16", conversion, "NAME sets dst[i] = F16 of src[i], which is float32, rounded to nearest even" + halves},
	{
		"stream", conversion,
		"NAME copies bytes, a multiple of BYTES, with non-temporal stores to dst, which is aligned to BYTES.\n" +
			"Other processors see them in order only after a fence.",
	},
	{
		"addLargest", "func(dst, a, b *byte, bytes int) uint32",
		"NAME sets dst[i] = a[i] + b[i], float32, for so many bytes, a multiple of BYTES, and returns the largest\n" +
			"bits of a magnitude of dst.",
	},
	{
		"largest", "func(src *byte, bytes int) uint32",
		"NAME returns the largest bits of a magnitude of src, float32, of so many bytes, a multiple of BYTES.",
	},
	{
		"quantize", "func(q, e *byte, bytes int, inverse, scale float32)",
		"NAME sets q[i] = int8(round(e[i]*inverse)), to nearest even, and then e[i] -= float32(q[i])*scale, for\n" +
			"so many bytes of q, a multiple of BYTES. Every e[i]*inverse is within int8.",
	},
	{
		"dequantize", "func(dst, q *byte, bytes int, scale float32)",
		"NAME sets dst[i] = float32(q[i]) * scale for so many bytes of q, a multiple of BYTES.",
	},
	{
		"addDequantized", "func(dst, q *byte, bytes int, scale float32)",
		"NAME sets dst[i] += float32(q[i]) * scale for so many bytes of q, a multiple of BYTES.",
	},
	{
		"addScaled", "func(dst, a, x *byte, bytes int, by float32)",
		"NAME sets dst[i] = a[i] + by*x[i], float32, for so many bytes, a multiple of BYTES.",
	},
	{
		"dot", "func(a, b *byte, bytes int) float32",
		"NAME returns the sum of a[i]*b[i], float32, over so many bytes, a multiple of BYTES. Element i is\n" +
			"added to partial sum i%32; then the upper half of the partial sums is added to the\n" +
			"lower one until one is left.",
	},
	{
		"squaresF32", "func(sums *float64, src *byte, bytes int)",
		"NAME adds src[i]*src[i] to sums[i%16] for so many bytes, a multiple of BYTES.",
	},
}

// expression writes the tree over n sources with an operation.
func expression(operation string, n int) string {
	nest := func(a, b string) string {
		s := fmt.Sprintf(operation, a, b)
		if operation[0] == '%' { // an operator
			s = "(" + s + ")"
		}
		return s
	}
	switch n {
	case 3:
		return fmt.Sprintf(operation, nest("a[i]", "b[i]"), "c[i]")
	case 4:
		return fmt.Sprintf(operation, nest("a[i]", "b[i]"), nest("c[i]", "d[i]"))
	}
	return fmt.Sprintf(operation, "a[i]", "b[i]")
}
