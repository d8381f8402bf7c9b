package flight

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// File is the records of one worker.
type File struct {
	Header
	Ranks []Rank `json:"-"`
}

// Header identifies the records of a file.
type Header struct {
	Version int       `json:"version"` // 1
	Job     string    `json:"job"`
	Epoch   uint32    `json:"epoch"` // how often the job was restarted
	Worker  int       `json:"worker"`
	At      time.Time `json:"at"`            // when it was written, by the worker's clock
	Why     string    `json:"why,omitempty"` // the reason for writing it
	Members []Member  `json:"members"`       // all workers of the job
}

// Member is a worker of the job.
type Member struct {
	Worker   int    `json:"worker"`
	Host     string `json:"host"`
	PID      int    `json:"pid"`
	First    int    `json:"first"`    // the rank of its first replica
	Replicas int    `json:"replicas"` // their ranks are consecutive
}

// String returns the worker's description: "worker 1 (host b, pid 4711)".
func (m *Member) String() string {
	return fmt.Sprintf("worker %d (host %s, pid %d)", m.Worker, m.Host, m.PID)
}

// Rank is the record of one rank of one communicator.
type Rank struct {
	Comm  string `json:"comm"`  // name of the communicator
	Epoch uint32 `json:"epoch"` // the communicator's: one more whenever it is rebuilt
	Rank  int    `json:"rank"`
	Size  int    `json:"size"`
	// World are the ranks of the job that correspond to the communicator's ranks. nil: the same.
	World []int `json:"world,omitempty"`
	// Entered is how many collectives it has entered, including those that are queued; Queued is how many
	// calls are queued, including sends and receives.
	Entered uint64 `json:"entered"`
	Queued  int    `json:"queued,omitempty"`
	Err     string `json:"err,omitempty"` // the failure of the communicator
	Calls   []Call `json:"-"`             // the last ones, in their order; earlier ones are dropped
}

// of returns the rank in the job of one of the communicator's ranks.
func (r *Rank) of(rank int) int {
	if r.World == nil || rank < 0 || rank >= len(r.World) {
		return rank
	}
	return r.World[rank]
}

// State is the progress of a call.
type State string

// The states.
const (
	Done    State = "done"
	Failed  State = "failed"
	Running State = "running" // it transfers or combines data, or has just begun
	Waiting State = "waiting" // for the ranks of WaitsFor
)

// Call is a call of one rank. Fields that may differ between the ranks are omitted: they are 0, "" or nil.
type Call struct {
	// Seq is the call's number: among the collectives of the communicator or, for a send or receive, among
	// those of the two ranks.
	Seq       uint64 `json:"seq"`
	Op        string `json:"op"`
	Reduce    string `json:"reduce,omitempty"`
	DType     string `json:"dtype,omitempty"`
	Count     int    `json:"count,omitempty"`  // elements of the whole vector
	Counts    []int  `json:"counts,omitempty"` // by rank
	Shape     []int  `json:"shape,omitempty"`
	Name      string `json:"name,omitempty"`
	Rooted    bool   `json:"rooted,omitempty"` // Root has a meaning
	Root      int    `json:"root,omitempty"`
	Order     string `json:"order,omitempty"` // of the reduction, where it is not the canonical one in the dtype
	Algorithm string `json:"algorithm,omitempty"`
	Pair      bool   `json:"pair,omitempty"` // a send or receive; Peer has a meaning
	Peer      int    `json:"peer,omitempty"`
	State     State  `json:"state"`
	// Start and End are by the rank's clock. For calls that transferred little and did not wait they are
	// zero, except for an occasional one. Start is when the call began or, if it transfers little, when it
	// began to wait.
	Start    time.Time `json:"start,omitzero"`
	End      time.Time `json:"end,omitzero"`
	WaitsFor []int     `json:"waits_for,omitempty"`
	Err      string    `json:"err,omitempty"`
}

// String formats a call as errors do: all_reduce SUM float32 [3] of "w".
func (c *Call) String() string {
	var b strings.Builder
	b.WriteString(c.Op)
	if c.Reduce != "" {
		b.WriteString(" " + c.Reduce)
	}
	switch {
	case c.DType == "":
	case c.Shape != nil:
		fmt.Fprintf(&b, " %s %v", c.DType, c.Shape)
	default:
		fmt.Fprintf(&b, " %s [%d]", c.DType, c.Count)
	}
	if len(c.Counts) > 0 {
		fmt.Fprintf(&b, " in parts of %v", c.Counts)
	}
	if c.Name != "" {
		fmt.Fprintf(&b, " of %q", c.Name)
	}
	switch {
	case c.Pair && c.Op == "recv":
		fmt.Fprintf(&b, " from rank %d", c.Peer)
	case c.Pair:
		fmt.Fprintf(&b, " to rank %d", c.Peer)
	case c.Rooted && (c.Op == "broadcast" || c.Op == "scatter"):
		fmt.Fprintf(&b, " from rank %d", c.Root)
	case c.Rooted:
		fmt.Fprintf(&b, " to rank %d", c.Root)
	}
	return b.String()
}

// field is a field of a collective that must agree.
type field struct {
	name string
	text func(*Call) string
}

var fields = []field{
	{"operation", func(c *Call) string { return c.Op }},
	{"reduction", func(c *Call) string { return c.Reduce }},
	{"dtype", func(c *Call) string { return c.DType }},
	{"root", func(c *Call) string { return fmt.Sprint(c.Root) }},
	{"name", func(c *Call) string { return fmt.Sprintf("%q", c.Name) }},
	{"shape", func(c *Call) string { return fmt.Sprint(c.dims()) }},
	{"counts by rank", func(c *Call) string { return fmt.Sprint(c.Counts) }},
	{"count", func(c *Call) string { return fmt.Sprint(c.Count) }},
	{"order of reduction", func(c *Call) string { return c.Order }},
	{"algorithm", func(c *Call) string { return c.Algorithm }},
}

// dims is the shape; for a vector it is its length.
func (c *Call) dims() []int {
	if c.Shape == nil && c.Counts == nil && c.DType != "" {
		return []int{c.Count}
	}
	return c.Shape
}

// differ returns the first field in which two calls differ, or nil.
func differ(a, b *Call) *field {
	if i := slices.IndexFunc(fields, func(f field) bool { return f.text(a) != f.text(b) }); i >= 0 {
		return &fields[i]
	}
	return nil
}
