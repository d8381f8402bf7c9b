package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Fact is the name and value of a setting that must be equal on all workers ("global batch", "model"). Pass a
// hash instead of a long value.
type Fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// facts is what one worker contributes to a comparison.
type facts struct {
	Host  string `json:"host"`
	PID   int    `json:"pid"`
	Facts []Fact `json:"facts"`
}

// DifferError reports the facts in which workers differ. All workers get equal ones.
type DifferError struct {
	What        string // the comparison's key
	Differences []Difference
}

// Difference is one fact and its different values.
type Difference struct {
	Name   string
	Values []ValueOf // the most frequent first
}

// ValueOf is a value, and the workers that have it.
type ValueOf struct {
	Value   string
	None    bool // they did not provide this fact
	Workers []int
	Names   []string // "worker 3 (host a, pid 17)", by Workers
}

// Error names every fact that differs, with each value and its workers.
func (e *DifferError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "the workers disagree on %q:", e.What)
	const shown = 4
	for i, d := range e.Differences {
		if i == shown {
			fmt.Fprintf(&b, "; and %d more", len(e.Differences)-shown)
			break
		}
		b.WriteString(strings.Repeat(";", min(i, 1)) + " " + d.Name + " is ")
		for j, v := range d.Values {
			if j > 0 {
				b.WriteString(", but ")
			}
			b.WriteString(v.String())
		}
	}
	return b.String()
}

// String returns the value and its workers: by host and process if they are few, else by number.
func (v *ValueOf) String() string {
	text := fmt.Sprintf("%q", shortened(v.Value))
	if v.None {
		text = "not given"
	}
	if len(v.Names) <= 4 {
		return text + " for " + enumerate(v.Names)
	}
	return text + " for " + numbers(v.Workers)
}

func shortened(s string) string {
	const most = 200
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}

// Compare compares the facts of all workers. If one differs, every worker gets the same *[DifferError]. It
// waits for all workers until ctx ends; the error is then a *[WaitError]. The key must be unique to this
// comparison.
func Compare(ctx context.Context, s Store, key string, worker, workers int, mine []Fact) error {
	text, err := json.Marshal(facts{hostName(), os.Getpid(), mine})
	if err != nil {
		return fmt.Errorf("rendezvous: comparison %q: %w", key, err)
	}
	record, err := collect(ctx, s, key, worker, workers, text, func(values [][]byte) []byte {
		text, _ := json.Marshal(compared(values)) // of strings and numbers: no error
		return text
	})
	if late := (*WaitError)(nil); errors.As(err, &late) {
		return err
	}
	var result comparison
	if err == nil {
		err = json.Unmarshal(record, &result)
	}
	if err != nil {
		return fmt.Errorf("rendezvous: comparison %q: %w", key, err)
	}
	switch {
	case result.Invalid != "":
		return fmt.Errorf("rendezvous: comparison %q: %s", key, result.Invalid)
	case len(result.Differences) > 0:
		return &DifferError{key, result.Differences}
	}
	return nil
}

// comparison is the result of a comparison.
type comparison struct {
	Invalid     string       `json:"invalid,omitempty"` // why a worker's facts cannot be compared
	Differences []Difference `json:"differences,omitempty"`
}

// compared compares the facts of all workers.
func compared(values [][]byte) comparison {
	given := make([]facts, len(values))
	for w, text := range values {
		if err := json.Unmarshal(text, &given[w]); err != nil {
			return comparison{Invalid: fmt.Sprintf("invalid facts of worker %d: %v", w, err)}
		}
	}
	return comparison{Differences: differences(given)}
}

// Differ is [Compare] for facts that are already known for all workers: of[i] are the facts of registrations[i]. It
// returns a *[DifferError], or nil.
func Differ(what string, registrations []Registration, of [][]Fact) error {
	given := make([]facts, len(registrations))
	for i := range given {
		given[i] = facts{registrations[i].Host, registrations[i].PID, of[i]}
	}
	found := differences(given)
	if len(found) == 0 {
		return nil
	}
	for i := range found {
		for j := range found[i].Values {
			v := &found[i].Values[j]
			for k, at := range v.Workers {
				v.Workers[k], v.Names[k] = registrations[at].Worker, registrations[at].String()
			}
		}
	}
	return &DifferError{what, found}
}

// differences returns the facts that differ, in the order in which they were provided.
func differences(given []facts) []Difference {
	var names []string
	known := map[string]bool{}
	for _, g := range given {
		for _, f := range g.Facts {
			if !known[f.Name] {
				known[f.Name] = true
				names = append(names, f.Name)
			}
		}
	}
	var out []Difference
	for _, name := range names {
		if d := differ(name, given); len(d.Values) > 1 {
			out = append(out, d)
		}
	}
	return out
}

// differ groups the workers by their values of a fact.
func differ(name string, given []facts) Difference {
	d := Difference{Name: name}
	for w, g := range given {
		at := slices.IndexFunc(g.Facts, func(f Fact) bool { return f.Name == name })
		v := ValueOf{None: at < 0}
		if at >= 0 {
			v.Value = g.Facts[at].Value
		}
		i := slices.IndexFunc(d.Values, func(o ValueOf) bool { return o.Value == v.Value && o.None == v.None })
		if i < 0 {
			i = len(d.Values)
			d.Values = append(d.Values, v)
		}
		name := Registration{Worker: w, Host: g.Host, PID: g.PID}
		d.Values[i].Workers = append(d.Values[i].Workers, w)
		d.Values[i].Names = append(d.Values[i].Names, name.String())
	}
	slices.SortStableFunc(d.Values, func(a, b ValueOf) int { return len(b.Workers) - len(a.Workers) })
	return d
}
