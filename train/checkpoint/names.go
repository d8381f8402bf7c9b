package checkpoint

import (
	"cmp"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// NameMap renames tensors, for weights of a program that uses other names. It is a list of rules, one per
// line:
//
//	# from                         to                            how
//	h.{i}.attn.c_proj.weight       /block_{i}/output/weights
//	model.layers.{i}.fc.weight     /layer_{i}/dense/weights      transpose
//	model.layers.{i}.fc.bias       /layer_{i}/dense/biases       reshape
//	{rest}.num_batches_tracked     -
//
// {i} is any text without a dot or a slash, and {rest...} any text; the new name repeats them. A rule applies
// to the whole name. The first rule that applies counts; without one, a tensor keeps its name. The new name "-"
// drops the tensor. "transpose" exchanges the two dimensions of a matrix, as PyTorch's nn.Linear needs, whose
// weights have the shape (out, in). "reshape" allows another shape of as many elements. A line that begins with #
// is a comment.
type NameMap struct {
	rules []nameRule
}

// nameRule is one line of a map.
type nameRule struct {
	line               string
	from               *regexp.Regexp
	to                 string // in the syntax of Regexp.Expand; "-" drops
	transpose, reshape bool
}

// LoadNameMap reads a map of names from a file.
func LoadNameMap(path string) (*NameMap, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, wrap(err)
	}
	m, err := ParseNameMap(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

var placeholder = regexp.MustCompile(`\{([a-z]+)(\.\.\.)?\}`)

// ParseNameMap parses a map of names.
func ParseNameMap(text string) (*NameMap, error) {
	m := &NameMap{}
	for i, line := range strings.Split(text, "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		rule, err := parseRule(fields)
		if err != nil {
			return nil, fmt.Errorf("checkpoint: map of names, line %d: %w", i+1, err)
		}
		rule.line = strings.Join(fields, " ")
		m.rules = append(m.rules, rule)
	}
	return m, nil
}

func parseRule(fields []string) (r nameRule, err error) {
	if len(fields) < 2 {
		return r, fmt.Errorf("%q: want a name, the new name, and perhaps transpose or reshape", fields[0])
	}
	pattern, known := strings.Builder{}, map[string]bool{}
	from, at := fields[0], 0
	for _, m := range placeholder.FindAllStringSubmatchIndex(from, -1) {
		name, text := from[m[2]:m[3]], `[^./]+`
		if m[4] >= 0 {
			text = `.+`
		}
		if known[name] {
			return r, fmt.Errorf("%s has {%s} twice", from, name)
		}
		known[name] = true
		fmt.Fprintf(&pattern, "%s(?P<%s>%s)", regexp.QuoteMeta(from[at:m[0]]), name, text)
		at = m[1]
	}
	pattern.WriteString(regexp.QuoteMeta(from[at:]))
	if r.from, err = regexp.Compile("^" + pattern.String() + "$"); err != nil {
		return r, err
	}
	for _, m := range placeholder.FindAllStringSubmatch(fields[1], -1) {
		if !known[m[1]] {
			return r, fmt.Errorf("%s has {%s}, which %s has not", fields[1], m[1], from)
		}
	}
	r.to = placeholder.ReplaceAllString(strings.ReplaceAll(fields[1], "$", "$$"), "$${$1}")
	for _, option := range fields[2:] {
		switch option {
		case "transpose":
			r.transpose = true
		case "reshape":
			r.reshape = true
		default:
			return r, fmt.Errorf("%q is neither transpose nor reshape", option)
		}
	}
	return r, nil
}

// Apply returns the tensors under their new names, sorted by these. shapes are those that the model wants, by
// name, for rules with "reshape"; it may be nil if there are none. Tensors that no rule transposes share memory
// with the old ones. A rule that applies to no tensor is an error, as are two tensors of one name.
func (m *NameMap) Apply(tensors []Tensor, shapes map[string][]int) ([]Tensor, error) {
	if m == nil {
		return tensors, nil
	}
	used := make([]bool, len(m.rules))
	var out []Tensor
	for _, t := range tensors {
		i := slices.IndexFunc(m.rules, func(r nameRule) bool { return r.from.MatchString(t.Name) })
		if i < 0 {
			out = append(out, t)
			continue
		}
		used[i] = true
		r := m.rules[i]
		if r.to == "-" {
			continue
		}
		name := string(r.from.ExpandString(nil, r.to, t.Name, r.from.FindStringSubmatchIndex(t.Name)))
		value := t.Value
		if r.transpose {
			if value.Rank() != 2 {
				return nil, fmt.Errorf("checkpoint: map of names, %q: %s has the shape %s: want a matrix to transpose", r.line,
					t.Name, tensor.FormatShape(value.Shape()))
			}
			value = transpose(value)
		}
		if shape, ok := shapes[name]; ok && r.reshape {
			n := 1
			for _, d := range shape {
				n *= d
			}
			if n != value.Len() {
				return nil, fmt.Errorf("checkpoint: map of names, %q: %s has the shape %s, which cannot be reshaped to %s", r.line,
					t.Name, tensor.FormatShape(value.Shape()), tensor.FormatShape(shape))
			}
			value = value.Reshape(shape...)
		}
		out = append(out, Tensor{name, value})
	}
	if i := slices.Index(used, false); i >= 0 {
		return nil, fmt.Errorf("checkpoint: map of names, %q: the file has no tensor of this name; it has %s",
			m.rules[i].line, FormatNames(namesOf(tensors)))
	}
	slices.SortFunc(out, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	for i := range out[min(1, len(out)):] {
		if out[i].Name == out[i+1].Name {
			return nil, fmt.Errorf("checkpoint: map of names: two tensors get the name %q", out[i].Name)
		}
	}
	return out, nil
}

func namesOf(tensors []Tensor) []string {
	list := make([]string, len(tensors))
	for i, t := range tensors {
		list[i] = t.Name
	}
	return list
}

// transpose returns a copy of a matrix with its dimensions exchanged.
func transpose(t *tensor.Tensor) *tensor.Tensor {
	rows, columns, n := t.Shape()[0], t.Shape()[1], t.DType().Bytes()
	out := tensor.New(t.DType(), columns, rows)
	from, to := t.Memory().HostBytes(), out.Memory().HostBytes()
	for j := range columns {
		for i := range rows {
			copy(to[(j*rows+i)*n:][:n], from[(i*columns+j)*n:])
		}
	}
	return out
}
