package membership

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Report is the message of a node: the states of all its workers.
type Report struct {
	Node int `json:"node"`
	// Nonce identifies the reporter's process, where it matters; "": the node's workers report.
	Nonce string `json:"nonce,omitempty"`
	// Count differs from that of every other report of the node.
	Count uint64 `json:"count"`
	// Final marks the last report: all workers of the node have left.
	Final bool `json:"final,omitempty"`
	// Epoch is the epoch of the job that the workers are in.
	Epoch uint32 `json:"epoch"`
	// ViewAge is how long after the latest view that the node is known to have written this report was sent, in
	// milliseconds, at least 1: the next coordinator counts the silence of this node by it. 0: it has made no view.
	ViewAge int64          `json:"view_age_ms,omitempty"`
	Workers []WorkerReport `json:"workers,omitempty"`
}

// WorkerReport is the state of a worker as its node's reporter knows it.
type WorkerReport struct {
	Worker int `json:"worker"`
	// Silent is the time without a new heartbeat, and Stalled that without progress, in milliseconds, by the
	// reporter's clock.
	Silent  int64 `json:"silent_ms,omitempty"`
	Stalled int64 `json:"stalled_ms,omitempty"`
	Heartbeat
}

// DecodeReport decodes and validates a report.
func DecodeReport(text []byte) (Report, error) {
	var r Report
	if err := decode(text, &r); err != nil {
		return r, fmt.Errorf("membership: a node's report: %w", err)
	}
	if r.Node < 0 || r.ViewAge < 0 || slices.ContainsFunc(r.Workers, func(w WorkerReport) bool {
		return w.Worker < 0 || w.Worker >= workersMax || w.Silent < 0 || w.Stalled < 0
	}) {
		return r, errors.New("membership: a node's report has a negative or too large number")
	}
	return r, nil
}

const (
	workersMax = 1 << 16 // bounds the numbers of workers, and so the length of every list
	nestedMax  = 16      // bounds how deep lists and objects of a text are nested
)

// decode decodes a JSON text that another process has written. It refuses a list of more than workersMax elements
// before it allocates any of them: an empty one has 3 bytes in the text and more than 100 in memory.
func decode(text []byte, into any) error {
	var commas [nestedMax]int
	depth := 0
	for i := 0; i < len(text) && depth >= 0; i++ {
		switch text[i] {
		case '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '[', '{':
			if depth++; depth == nestedMax {
				return fmt.Errorf("it is nested deeper than %d levels", nestedMax-1)
			}
			commas[depth] = 0
		case ']', '}':
			depth--
		case ',':
			if commas[depth]++; commas[depth] == workersMax {
				return fmt.Errorf("it has a list of more than %d elements", workersMax)
			}
		}
	}
	return json.Unmarshal(text, into) // which refuses what is not JSON before it allocates
}

// Doubt is what is not normal about a worker, or about a node and so about all its workers.
type Doubt struct {
	// Node and Nonce are the silent node's; Node is -1 for a single worker of a node that sends reports.
	Node  int    `json:"node"`
	Nonce string `json:"nonce,omitempty"`
	Epoch uint32 `json:"epoch,omitempty"`
	// Workers are the workers in doubt.
	Workers []int `json:"workers,omitempty"`
	// Lost is the verdict; without it silent workers are suspects.
	Lost    bool  `json:"lost,omitempty"`
	Silent  int64 `json:"silent_ms,omitempty"`
	Stalled int64 `json:"stalled_ms,omitempty"`
	// Unseen reports that no heartbeat has ever arrived. Phase and Progress are those of a worker that stalls.
	Unseen bool `json:"unseen,omitempty"`
	// Reported: its node's reporter, another process of its host, reports the silence: the host can be reached.
	Reported bool   `json:"reported,omitempty"`
	Phase    string `json:"phase,omitempty"`
	Progress uint64 `json:"progress,omitempty"`
}

// View is the state of all members as the coordinator sees it: what is not normal.
type View struct {
	// Term counts the coordinators, and Count the views of one. Node is the coordinator's.
	Term  uint64 `json:"term"`
	Count uint64 `json:"count"`
	Node  int    `json:"node"`
	// Released reports that the coordinator leaves: any other takes over at once.
	Released bool    `json:"released,omitempty"`
	Doubts   []Doubt `json:"doubts,omitempty"`
	// Epoch is the latest epoch of the job that a node has reported: that of Left and First.
	Epoch uint32 `json:"epoch,omitempty"`
	// Left are the first and last numbers of ranges of workers that have left.
	Left [][2]int `json:"left,omitempty"`
	// First is the state of worker 0. If the store ends with it, nothing else says where it was.
	First *WorkerReport `json:"first,omitempty"`
}

// decodeView decodes and validates a view.
func decodeView(text []byte) (*View, error) {
	v := &View{}
	if len(text) > viewMax {
		return nil, fmt.Errorf("membership: a view of %d bytes, want at most %d", len(text), viewMax)
	}
	if err := decode(text, v); err != nil {
		return nil, fmt.Errorf("membership: a view: %w", err)
	}
	for _, d := range v.Doubts {
		if d.Silent < 0 || d.Stalled < 0 || slices.ContainsFunc(d.Workers,
			func(w int) bool { return w < 0 || w >= workersMax }) {
			return nil, errors.New("membership: a view has a negative or too large number")
		}
	}
	for _, r := range v.Left {
		if r[0] < 0 || r[1] >= workersMax {
			return nil, errors.New("membership: a view has a negative or too large number")
		}
	}
	return v, nil
}

// viewMax bounds the text of a view, in bytes, so that an answer, of at most answerBytes, always has space for it and
// for what the store has acknowledged. doubtsMax is how many doubts a view describes one by one if it would be longer.
const (
	viewMax   = answerBytes / 4 * 3
	doubtsMax = 256
)

// encode returns the text of the view. If that is too long, it describes fewer doubts one by one.
func (v *View) encode() []byte {
	text := encode(v)
	for _, whole := range []int{doubtsMax, 0} {
		if len(text) > viewMax {
			text = encode(v.merged(whole))
		}
	}
	return text
}

// encode returns a value of this package as JSON.
func encode(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own types
	}
	return text
}

// merged returns the view with so many whole doubts: those of lost members first, and of these the ones that have been
// silent longest. The others are merged: each worker in doubt is listed, with the shortest silence of all that are like
// it, but neither with its node nor with its phase.
func (v *View) merged(whole int) *View {
	if whole >= len(v.Doubts) {
		return v
	}
	out, doubts := *v, slices.Clone(v.Doubts)
	slices.SortStableFunc(doubts, func(a, b Doubt) int {
		if a.Lost != b.Lost {
			if a.Lost {
				return -1
			}
			return 1
		}
		return cmp.Compare(b.Silent, a.Silent)
	})
	type kind struct {
		epoch                           uint32
		lost, unseen, reported, stalled bool
	}
	groups := map[kind]int{}
	out.Doubts = doubts[:whole:whole]
	for i := range doubts[whole:] {
		d := &doubts[whole+i]
		k := kind{d.Epoch, d.Lost, d.Unseen, d.Reported, d.Stalled > 0}
		at, known := groups[k]
		if !known {
			at = len(out.Doubts)
			groups[k] = at
			out.Doubts = append(out.Doubts, Doubt{
				Node: -1, Epoch: d.Epoch, Lost: d.Lost, Unseen: d.Unseen, Reported: d.Reported, Silent: d.Silent,
				Stalled: d.Stalled,
			})
		}
		g := &out.Doubts[at]
		g.Workers = append(g.Workers, d.Workers...)
		g.Silent, g.Stalled = min(g.Silent, d.Silent), min(g.Stalled, d.Stalled)
	}
	for i := range out.Doubts[whole:] {
		g := &out.Doubts[whole+i]
		slices.Sort(g.Workers)
		g.Workers = slices.Compact(g.Workers)
	}
	return &out
}

// lost returns the workers and nodes that the view declares lost.
func (v *View) lost() (out []Doubt) {
	for _, d := range v.Doubts {
		if d.Lost {
			out = append(out, d)
		}
	}
	return out
}

// losesMore reports whether the view declares a worker or a node lost that an earlier one does not.
func (v *View) losesMore(before *View) bool {
	type member struct{ node, worker int }
	known := map[member]bool{}
	for _, d := range before.lost() {
		known[member{d.Node, -1}] = true
		for _, w := range d.Workers {
			known[member{-1, w}] = true
		}
	}
	for _, d := range v.lost() {
		if d.Node >= 0 && !known[member{d.Node, -1}] ||
			slices.ContainsFunc(d.Workers, func(w int) bool { return !known[member{-1, w}] }) {
			return true
		}
	}
	return false
}

func milliseconds(d time.Duration) int64 { return max(0, d.Milliseconds()) }

func fromMilliseconds(n int64) time.Duration { return time.Duration(n) * time.Millisecond }
