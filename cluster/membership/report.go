package membership

import (
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
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("membership: a node's report: %w", err)
	}
	if r.Node < 0 || r.ViewAge < 0 || slices.ContainsFunc(r.Workers, func(w WorkerReport) bool {
		return w.Worker < 0 || w.Worker >= workersMax || w.Silent < 0 || w.Stalled < 0
	}) {
		return r, errors.New("membership: a node's report has a negative or too large number")
	}
	return r, nil
}

// workersMax bounds the numbers of workers.
const workersMax = 1 << 16

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
	if err := json.Unmarshal(text, v); err != nil {
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
