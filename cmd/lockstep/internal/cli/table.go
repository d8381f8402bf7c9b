package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/terminal"
)

// Table prints rows of a name and a text in two columns. On a terminal, texts wrap within their column; only a
// word that is wider than the column exceeds it.
type Table [][2]string

// Row adds a row.
func (t *Table) Row(name, format string, args ...any) {
	*t = append(*t, [2]string{name, fmt.Sprintf(format, args...)})
}

// Print writes the table.
func (t Table) Print(out io.Writer) error {
	names := 0
	for _, row := range t {
		names = max(names, len(row[0])+2)
	}
	width, isTerminal := terminal.Columns(out)
	var b strings.Builder
	for _, row := range t {
		lines := []string{row[1]}
		if isTerminal {
			lines = WrapWords(row[1], width()-names)
		}
		for i, line := range lines {
			name := row[0]
			if i > 0 {
				name = ""
			}
			fmt.Fprintf(&b, "%-*s%s\n", names, name, line)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// WriteJSON writes v as one line of JSON, the form of --format json that docs/json.md describes. One write: several
// workers may share a pipe.
func WriteJSON(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(text, '\n'))
	return err
}

// Number is a float64 in JSON: null if it is not finite.
type Number float64

// MarshalJSON implements json.Marshaler.
func (n Number) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(n)) || math.IsInf(float64(n), 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, float64(n), 'g', -1, 64), nil
}
