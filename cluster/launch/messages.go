package launch

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// message is a record that an agent writes into the store for the others.
type message interface {
	// path returns the end of its key. It begins with the kind of the message.
	path() string
	// valid reports whether an agent can have written it.
	valid() bool
}

// messages has an empty message of each kind.
var messages = map[string]func() message{
	"slot":      func() message { return &nodeSlot{} },
	"members":   func() message { return &epochMembers{} },
	"stop":      func() message { return &epochStop{} },
	"end":       func() message { return &nodeEnd{} },
	"interrupt": func() message { return &interruption{} },
	"kill":      func() message { return &killRequest{} },
	"ended":     func() message { return &jobEnd{} },
}

// decode decodes the message whose key ends with path. It returns false if no agent can have written it there.
func decode(path string, entry rendezvous.Entry) (message, bool) {
	kind, _, _ := strings.Cut(path, "/")
	empty, known := messages[kind]
	if !known || entry.Deleted {
		return nil, false
	}
	m := empty()
	if json.Unmarshal(entry.Value, m) != nil || !m.valid() || m.path() != path {
		return nil, false
	}
	switch m := m.(type) {
	case *nodeSlot:
		m.revision = entry.Revision
	case *jobEnd:
		m.text = entry.Value
	}
	return m, true
}

// encode encodes a message.
func encode(m message) []byte {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // our own types
	}
	return text
}

// ofEpoch is the part of a message that concerns one epoch only.
type ofEpoch struct {
	Epoch uint32 `json:"epoch"`
}

func (o ofEpoch) epoch() uint32 { return o.Epoch }

// epochMembers begins an epoch: it has the agents in it. The first one written for an epoch counts.
type epochMembers struct {
	ofEpoch
	Slots []nodeSlot `json:"slots"` // by node
}

func (m *epochMembers) path() string { return fmt.Sprintf("members/%d", m.Epoch) }
func (m *epochMembers) valid() bool  { return len(m.Slots) > 0 }

// has reports whether an agent takes part.
func (m *epochMembers) has(nonce string) bool {
	return slices.ContainsFunc(m.Slots, func(s nodeSlot) bool { return s.Nonce == nonce })
}

// epochStop ends an epoch on all nodes: a worker has failed.
type epochStop struct {
	ofEpoch
	Worker int `json:"worker"`
}

func (m *epochStop) path() string { return fmt.Sprintf("stop/%d", m.Epoch) }
func (m *epochStop) valid() bool  { return m.Worker >= 0 }

// nodeEnd is what an agent writes when all its workers have ended.
type nodeEnd struct {
	ofEpoch
	Node       int             `json:"node"`
	Failures   []failureReport `json:"failures,omitempty"`
	CleanExits []cleanExit     `json:"clean_exits,omitempty"`
}

// cleanExit is a clean exit: a worker that ended with code 0. It is a failure only if the others still needed it.
type cleanExit struct {
	Worker int    `json:"worker"`
	Host   string `json:"host"`
	PID    int    `json:"pid"`
}

// failureReport is a failure: the record, with the last output of the worker.
type failureReport struct {
	failure.Record

	Stderr []string `json:"stderr,omitempty"`
}

func (m *nodeEnd) path() string { return fmt.Sprintf("end/%d/%d", m.Epoch, m.Node) }
func (m *nodeEnd) valid() bool  { return m.Node >= 0 }

// bounded drops the parts that make a message too long for the store.
func (m nodeEnd) bounded() *nodeEnd {
	m.Failures = slices.Clone(m.Failures)
	for i := len(m.Failures) - 1; i >= 0 && len(encode(&m)) > rendezvous.ValueMax/2; i-- {
		m.Failures[i].Stack, m.Failures[i].Stderr = "", nil
	}
	return &m
}

// interruption is a user's first signal, forwarded to the other agents.
type interruption struct {
	ofEpoch
	Node      int  `json:"node"`
	Terminate bool `json:"terminate,omitempty"` // SIGTERM, else Ctrl-C
}

func (m *interruption) path() string { return fmt.Sprintf("interrupt/%d", m.Epoch) }
func (m *interruption) valid() bool  { return m.Node >= 0 }

func (m *interruption) signal() os.Signal {
	if m.Terminate {
		return sigTerminate
	}
	return sigInterrupt
}

// killRequest is a user's second signal.
type killRequest struct{ ofEpoch }

func (m *killRequest) path() string { return fmt.Sprintf("kill/%d", m.Epoch) }
func (m *killRequest) valid() bool  { return true }
