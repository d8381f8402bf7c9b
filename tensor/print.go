package tensor

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// NumPy's print options (numpy.set_printoptions), at their defaults.
const (
	printLineBytes = 75   // lines are wrapped at this width
	printThreshold = 1000 // larger tensors are shortened
	printEdge      = 3    // to this many items at both ends of a dimension
	printPrecision = 8    // digits after the point
)

// String prints the tensor as TensorFlow does: tf.Tensor([1. 2.], shape=(2,), dtype=float32).
func (t *Tensor) String() string {
	s := t.Format()
	if strings.Contains(s, "\n") {
		s = "\n" + s
	}
	return fmt.Sprintf("tf.Tensor(%s, shape=%s, dtype=%v)", s, FormatShape(t.shape), t.dtype)
}

// Format prints the elements as NumPy's str does (versions 1.14 to 2.2), in columns: [1. 2.], or on several
// lines [[ 1. 20.] [ 3.  4.]]. Of more than 1000 elements, 3 items at both ends of each dimension are shown.
// Device memory is printed as "?".
func (t *Tensor) Format() string {
	if len(t.shape) == 0 {
		return t.formatScalar()
	}
	n := t.Len()
	if n == 0 {
		return "[]"
	}
	return newPrinter(t, " ").format(0, 0, " ", printLineBytes)
}

// Repr prints the elements as NumPy's repr does (version 2.2): array([1., 2.], dtype=float32). A scalar is
// printed as TensorFlow prints it in a variable.
func (t *Tensor) Repr() string {
	if len(t.shape) == 0 {
		return t.formatScalar()
	}
	const array = "array("
	s, n := array+"[]", t.Len()
	if n > 0 {
		s = array + newPrinter(t, ", ").format(0, 0, " "+strings.Repeat(" ", len(array)), printLineBytes-len(")"))
	}
	var extras []string
	if n == 0 && len(t.shape) > 1 || n > printThreshold {
		extras = append(extras, "shape="+FormatShape(t.shape))
	}
	switch {
	case t.dtype == String:
		extras = append(extras, "dtype=object")
	case n == 0 || t.dtype != Bool && t.dtype != Int64 && t.dtype != Float64: // else NumPy's own choice
		extras = append(extras, "dtype="+t.dtype.String())
	}
	if extras == nil {
		return s + ")"
	}
	s += ","
	extra := strings.Join(extras, ", ") + ")"
	if len(s)-strings.LastIndexByte(s, '\n')-1+len(extra)+1 > printLineBytes {
		return s + "\n" + strings.Repeat(" ", len(array)) + extra
	}
	return s + " " + extra
}

// printer implements NumPy's array2string.
type printer struct {
	t     *Tensor
	sep   string // between elements
	short bool
	shown []int // indices of the elements that are printed
	item  func(i int) string
}

func newPrinter(t *Tensor, sep string) *printer {
	p := &printer{t: t, sep: sep, short: t.Len() > printThreshold}
	p.each(0, 0, func(i int) { p.shown = append(p.shown, i) })
	p.item = p.formatter()
	return p
}

// items calls f with the shown positions of a dimension of length n, and with -1 for omitted ones.
func (p *printer) items(n int, f func(i int)) {
	if !p.short || n <= 2*printEdge {
		for i := range n {
			f(i)
		}
		return
	}
	for i := range printEdge {
		f(i)
	}
	f(-1)
	for i := n - printEdge; i < n; i++ {
		f(i)
	}
}

// each calls f with the index of every shown element of dimension dim, starting at element at.
func (p *printer) each(dim, at int, f func(i int)) {
	if dim == len(p.t.shape) {
		f(at)
		return
	}
	stride := count(p.t.shape[dim+1:])
	p.items(p.t.shape[dim], func(i int) {
		if i >= 0 {
			p.each(dim+1, at+i*stride, f)
		}
	})
}

// format prints dimension dim, starting at element at. Its lines after the first begin with indent and have
// width columns.
func (p *printer) format(dim, at int, indent string, width int) string {
	var b strings.Builder
	below := len(p.t.shape) - dim - 1 // dimensions
	b.WriteByte('[')
	if below == 0 {
		line := indent
		p.items(p.t.shape[dim], func(i int) {
			word := "..."
			if i >= 0 {
				word = p.item(at + i)
			}
			if len(line)+len(word) > width-1 && len(line) > len(indent) {
				b.WriteString(strings.TrimRight(line[len(indent):], " ") + "\n" + indent)
				line = indent
			}
			line += word + p.sep
		})
		b.WriteString(line[len(indent) : len(line)-len(p.sep)])
	} else {
		stride := count(p.t.shape[dim+1:])
		separator := ""
		p.items(p.t.shape[dim], func(i int) {
			b.WriteString(separator)
			separator = strings.TrimRight(p.sep, " ") + strings.Repeat("\n", below) + indent
			if i < 0 {
				b.WriteString("...")
				return
			}
			b.WriteString(p.format(dim+1, at+i*stride, indent+" ", width-1))
		})
	}
	b.WriteByte(']')
	return b.String()
}

// formatter returns a function that prints one element, padded to the common width of all shown elements.
func (p *printer) formatter() func(i int) string {
	t := p.t
	switch {
	case t.mem.Kind == Device, t.dtype == String, t.dtype == BFloat16: // NumPy does not align foreign types
		return t.formatAt
	case t.dtype == Bool:
		return func(i int) string { return padLeft(t.formatAt(i), len("False")) }
	case t.dtype.IsInteger():
		width := 0
		for _, i := range p.shown {
			width = max(width, len(t.formatAt(i)))
		}
		return func(i int) string { return padLeft(t.formatAt(i), width) }
	}
	return p.floats()
}

// floats implements NumPy's FloatingFormat: all numbers have an exponent or none has, and their points are
// aligned.
func (p *printer) floats() func(i int) string {
	lo, hi := math.Inf(1), 0.0
	strange := 0 // width of the longest infinity or NaN
	for _, i := range p.shown {
		x := p.t.float64At(i)
		if math.IsNaN(x) || math.IsInf(x, 0) {
			strange = max(strange, len(strangeFloat(x)))
			continue
		}
		if x != 0 {
			lo, hi = min(lo, math.Abs(x)), max(hi, math.Abs(x))
		}
	}
	exponents := hi > 0 && (hi >= 1e8 || lo < 1e-4 || p.t.ratio(hi, lo) > 1000)
	left, right, exponent := 0, 0, 0 // widths before the point, after it, and of the exponent's digits
	for _, i := range p.shown {
		if x := p.t.float64At(i); !math.IsNaN(x) && !math.IsInf(x, 0) {
			mantissa, e, _ := strings.Cut(p.t.digits(x, exponents), "e")
			whole, part, _ := strings.Cut(mantissa, ".")
			left, right, exponent = max(left, len(whole)), max(right, len(part)), max(exponent, len(e)-1)
		}
	}
	tail := right // everything after the point
	if exponents {
		tail += len("e+") + exponent
	}
	if strange > 0 {
		left = max(left, strange-tail-1)
	}
	return func(i int) string {
		x := p.t.float64At(i)
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return padLeft(strangeFloat(x), left+1+tail)
		}
		if !exponents {
			whole, part, _ := strings.Cut(p.t.digits(x, false), ".")
			return padLeft(whole, left) + "." + part + strings.Repeat(" ", right-len(part))
		}
		mantissa, e, _ := strings.Cut(strconv.FormatFloat(x, 'e', right, 64), "e")
		whole, part, _ := strings.Cut(mantissa, ".")
		return padLeft(whole, left) + "." + part + "e" + e[:1] + strings.Repeat("0", exponent-len(e)+1) + e[1:]
	}
}

// ratio divides with the precision of the dtype.
func (t *Tensor) ratio(a, b float64) float64 {
	switch t.dtype {
	case Float16:
		return float64(F16From(float32(a / b)).Float32())
	case Float32:
		return float64(float32(a) / float32(b))
	}
	return a / b
}

// digits prints a finite number with the fewest digits that identify it in its dtype, at most printPrecision
// after the point, and always with a point: "1.", "0.5", "1.5e-05".
func (t *Tensor) digits(x float64, exponent bool) string {
	format := byte('f')
	if exponent {
		format = 'e'
	}
	s := t.shortest(x, format)
	mantissa, e, _ := strings.Cut(s, "e")
	whole, part, _ := strings.Cut(mantissa, ".")
	if len(part) > printPrecision {
		mantissa, e, _ = strings.Cut(strconv.FormatFloat(x, format, printPrecision, 64), "e")
		whole, part, _ = strings.Cut(mantissa, ".")
		part = strings.TrimRight(part, "0")
	}
	if exponent {
		e = "e" + e
	}
	return whole + "." + part + e
}

// shortest prints x with the fewest digits that identify it in the dtype.
func (t *Tensor) shortest(x float64, format byte) string {
	switch t.dtype {
	case Float16:
		for precision := 0; ; precision++ { // strconv does not support binary16, whose numbers need at most 5 digits
			e := strconv.FormatFloat(x, 'e', precision, 64)
			y, _ := strconv.ParseFloat(e, 64)
			if float64(F16From(float32(y)).Float32()) == x {
				return strconv.FormatFloat(y, format, -1, 64)
			}
		}
	case Float32:
		return strconv.FormatFloat(x, format, -1, 32)
	}
	return strconv.FormatFloat(x, format, -1, 64)
}

// formatScalar prints a tensor without dimensions, as NumPy prints its scalars.
func (t *Tensor) formatScalar() string {
	if t.mem.Kind == Device || t.dtype != Float16 && t.dtype != Float32 && t.dtype != Float64 {
		return t.formatAt(0)
	}
	x := t.float64At(0)
	switch a := math.Abs(x); {
	case math.IsNaN(x) || math.IsInf(x, 0):
		return strangeFloat(x)
	case a != 0 && (a < 1e-4 || a >= 1e16):
		return t.shortest(x, 'e')
	}
	s := t.shortest(x, 'f')
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// formatAt prints one element without padding.
func (t *Tensor) formatAt(i int) string {
	switch {
	case t.mem.Kind == Device:
		return "?"
	case t.dtype == String:
		return quoteBytes(t.strings[i])
	case t.dtype == Bool:
		if Data[bool](t)[i] {
			return "True"
		}
		return "False"
	case t.dtype == Int64:
		return strconv.FormatInt(Data[int64](t)[i], 10)
	case t.dtype == Uint64:
		return strconv.FormatUint(Data[uint64](t)[i], 10)
	case t.dtype.IsInteger():
		return strconv.FormatInt(int64(t.float64At(i)), 10)
	}
	x := t.float64At(i)
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return strangeFloat(x)
	}
	return strconv.FormatFloat(x, 'g', 6, 64) // as ml_dtypes prints a bfloat16
}

// strangeFloat prints an infinity or NaN.
func strangeFloat(x float64) string {
	switch {
	case math.IsNaN(x):
		return "nan"
	case x > 0:
		return "inf"
	}
	return "-inf"
}

// quoteBytes prints a string as Python's repr does bytes: b'it\'s'.
func quoteBytes(s string) string {
	quote := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	b := []byte{'b', quote}
	for i := range len(s) {
		switch c := s[i]; {
		case c == quote || c == '\\':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c < ' ' || c > '~':
			b = fmt.Appendf(b, `\x%02x`, c)
		default:
			b = append(b, c)
		}
	}
	return string(append(b, quote))
}

func padLeft(s string, width int) string {
	return strings.Repeat(" ", max(0, width-len(s))) + s
}

// FormatShape prints a shape as Python prints a tuple: (), (3,), (2, 3).
func FormatShape(shape []int) string {
	var b strings.Builder
	b.WriteByte('(')
	for i, d := range shape {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(strconv.Itoa(d))
	}
	if len(shape) == 1 {
		b.WriteByte(',')
	}
	b.WriteByte(')')
	return b.String()
}
