package chooser

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

// Table is the data from which algorithms are chosen. It is stored as JSON; every field has a unit in its
// name.
type Table struct {
	Version     int                  `json:"version"`                  // of the format: [Version]
	Machine     string               `json:"machine"`                  // what it was measured on
	Combine     float64              `json:"combine_bytes_per_second"` // read by one rank while it reduces
	Copy        float64              `json:"copy_bytes_per_second"`    // copied by one rank
	Transports  map[string]Transport `json:"transports"`               // by name; "network" is the link between hosts
	Corrections []Correction         `json:"corrections,omitempty"`
	Rules       []Rule               `json:"rules,omitempty"`
}

// Version is the version of the table's format.
const Version = 1

// Transport is the cost of a transport. A field that is 0 does not apply to it.
type Transport struct {
	Sync  int64   `json:"sync_ns,omitempty"`                // one synchronisation of ranks in memory
	Read  float64 `json:"read_bytes_per_second,omitempty"`  // by one rank, from another's memory
	Frame int64   `json:"frame_ns,omitempty"`               // one frame without data
	Send  float64 `json:"frame_bytes_per_second,omitempty"` // of one rank's frames, in each direction
}

// Correction states how measured times of an algorithm differ from the prediction of its cost function.
// Between the sizes of two corrections the factor is interpolated over the logarithm of the size; beyond them
// the nearest one applies.
type Correction struct {
	Algorithm string  `json:"algorithm"`
	Operation string  `json:"operation"` // "all_reduce"
	Over      string  `json:"over"`      // "mem", "shm", "tcp", "network", or two joined: "shm+network"
	Bytes     int     `json:"bytes"`
	Factor    float64 `json:"factor"` // measured / predicted
}

// Rule names the algorithm for some problems, independent of its predicted cost. The first rule that applies,
// and whose algorithm fits, decides.
type Rule struct {
	Operation string `json:"operation,omitempty"` // empty: every one
	Over      string `json:"over,omitempty"`      // empty: every one
	RanksMin  int    `json:"ranks_min,omitempty"`
	RanksMax  int    `json:"ranks_max,omitempty"` // 0: no limit
	BytesMin  int    `json:"bytes_min,omitempty"`
	BytesMax  int    `json:"bytes_max,omitempty"` // 0: no limit
	// RanksPerCoreMin is the least number of ranks for each processor of their hosts; 0: no limit.
	RanksPerCoreMin float64 `json:"ranks_per_core_min,omitempty"`
	Algorithm       string  `json:"algorithm"`
}

//go:embed table.json
var builtIn []byte

var parsed = sync.OnceValue(func() *Table {
	t, err := Parse(builtIn)
	if err != nil {
		panic("chooser: the built-in table: " + err.Error())
	}
	return t
})

// Default returns the built-in table. It must not be changed.
func Default() *Table { return parsed() }

// Parse parses and validates a table. Unknown fields and names are errors, so that a misspelling does not go
// unnoticed.
func Parse(text []byte) (*Table, error) {
	t := &Table{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(t); err != nil {
		return nil, fmt.Errorf("chooser: table: %w", err)
	}
	if d.More() {
		return nil, fmt.Errorf("chooser: table: text after the end of the table")
	}
	if err := t.check(); err != nil {
		return nil, fmt.Errorf("chooser: table: %w", err)
	}
	return t, nil
}

// tableBytesMax bounds the file of a table.
const tableBytesMax = 1 << 20

// Load reads a table from a file of at most one MiB.
func Load(path string) (*Table, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("chooser: %w", err)
	}
	defer f.Close()
	// the size that Stat reports is not a bound: a device has the size 0
	text, err := io.ReadAll(io.LimitReader(f, tableBytesMax+1))
	if err != nil {
		return nil, fmt.Errorf("chooser: %w", err)
	}
	if len(text) > tableBytesMax {
		return nil, fmt.Errorf("chooser: %s: more than %d bytes, the maximum size of a table", path, tableBytesMax)
	}
	t, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%w (in %s)", err, path)
	}
	return t, nil
}

// Save writes the table to a file atomically.
func (t *Table) Save(path string) error {
	if err := t.check(); err != nil {
		return fmt.Errorf("chooser: table: %w", err)
	}
	text, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return fmt.Errorf("chooser: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".table-*")
	if err != nil {
		return fmt.Errorf("chooser: %w", err)
	}
	defer os.Remove(f.Name()) // after the rename this removes nothing
	_, err = f.Write(append(text, '\n'))
	if e := f.Chmod(0o644); err == nil {
		err = e
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("chooser: writing %s: %w", path, err)
	}
	return nil
}

func (t *Table) check() error {
	if t.Version != Version {
		return fmt.Errorf("version %d: this build reads version %d", t.Version, Version)
	}
	if !rate(t.Combine) || !rate(t.Copy) {
		return fmt.Errorf("combine_bytes_per_second and copy_bytes_per_second are %v and %v: want positive numbers",
			t.Combine, t.Copy)
	}
	for name, tr := range t.Transports {
		if tr.Sync < 0 || tr.Frame < 0 || tr.Read != 0 && !rate(tr.Read) || tr.Send != 0 && !rate(tr.Send) {
			return fmt.Errorf("transport %q has a negative time or rate", name)
		}
	}
	if tr := t.Transports["network"]; tr.Send == 0 {
		return fmt.Errorf(`no transport "network" with a frame_bytes_per_second: it is required for the links between hosts`)
	}
	for i, c := range t.Corrections {
		if err := known(c.Algorithm, c.Operation); err != nil {
			return fmt.Errorf("correction %d: %w", i, err)
		}
		if c.Bytes < 0 || !rate(c.Factor) {
			return fmt.Errorf("correction %d: %d bytes, factor %v: want a size and a positive factor", i, c.Bytes, c.Factor)
		}
	}
	for i, r := range t.Rules {
		if err := known(r.Algorithm, r.Operation); err != nil {
			return fmt.Errorf("rule %d: %w", i, err)
		}
		if r.RanksMin < 0 || r.BytesMin < 0 || r.RanksMax != 0 && r.RanksMax < r.RanksMin ||
			r.BytesMax != 0 && r.BytesMax < r.BytesMin {
			return fmt.Errorf("rule %d: an empty range", i)
		}
		if r.RanksPerCoreMin != 0 && !rate(r.RanksPerCoreMin) {
			return fmt.Errorf("rule %d: %v ranks for each core: want a positive number", i, r.RanksPerCoreMin)
		}
	}
	return nil
}

func rate(x float64) bool { return x > 0 && !math.IsInf(x, 0) }

// known returns an error if an algorithm or operation does not exist; an empty operation means all.
func known(algorithm, operation string) error {
	if _, err := Find(algorithm); err != nil {
		return err
	}
	if op, err := plan.ParseOp(operation); operation != "" && (err != nil || op.String() != operation) {
		return fmt.Errorf("no operation %q", operation)
	}
	return nil
}

// links returns the table's numbers in the form of the cost functions. A transport that is not in the table
// has the numbers of the network: it is safer to overestimate the cost.
func (t *Table) links(w Where) plan.Links {
	memory, frames := t.Transports[w.Memory], w.Frames
	if frames == "" {
		frames = w.Memory
	}
	host, ok := t.Transports[frames]
	if !ok || host.Send == 0 {
		host = t.Transports["network"]
	}
	network := t.Transports["network"]
	return plan.Links{
		Memory:       plan.Link{Latency: time.Duration(memory.Sync), Bandwidth: memory.Read},
		Host:         plan.Link{Latency: time.Duration(host.Frame), Bandwidth: host.Send},
		Network:      plan.Link{Latency: time.Duration(network.Frame), Bandwidth: network.Send},
		Combine:      t.Combine,
		Copy:         t.Copy,
		Cores:        w.Cores,
		ElementBytes: max(1, w.ElementBytes),
	}
}

// rule returns the algorithm of the first rule that applies and fits, or "".
func (t *Table) rule(p plan.Problem, w Where, bytes int) string {
	over := w.over(p)
	for _, r := range t.Rules {
		applies := (r.Operation == "" || r.Operation == p.Op.String()) && (r.Over == "" || r.Over == over) &&
			p.Size >= r.RanksMin && (r.RanksMax == 0 || p.Size <= r.RanksMax) &&
			bytes >= r.BytesMin && (r.BytesMax == 0 || bytes <= r.BytesMax) && w.ranksPerCore(p) >= r.RanksPerCoreMin
		if !applies {
			continue
		}
		if _, err := Named(r.Algorithm, p, w); err == nil {
			return r.Algorithm
		}
	}
	return ""
}

// factor returns the correction for a size: interpolated between its neighbours, or 1 if the table has none.
func (t *Table) factor(algorithm string, op plan.Op, over string, bytes int) float64 {
	var below, above *Correction
	for i := range t.Corrections {
		c := &t.Corrections[i]
		if c.Algorithm != algorithm || c.Over != over || c.Operation != op.String() {
			continue
		}
		if c.Bytes <= bytes && (below == nil || c.Bytes > below.Bytes) {
			below = c
		}
		if c.Bytes >= bytes && (above == nil || c.Bytes < above.Bytes) {
			above = c
		}
	}
	switch {
	case below == nil && above == nil:
		return 1
	case below == nil:
		return above.Factor
	case above == nil || above.Bytes == below.Bytes:
		return below.Factor
	}
	lo, hi, at := logOf(below.Bytes), logOf(above.Bytes), logOf(bytes)
	return below.Factor + (above.Factor-below.Factor)*(at-lo)/(hi-lo)
}

func logOf(bytes int) float64 { return math.Log2(float64(bytes + 1)) }

// Over returns the names for which the table has numbers, in order.
func (t *Table) Over() []string {
	return slices.Sorted(maps.Keys(t.Transports))
}
