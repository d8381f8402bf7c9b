package timeline

import (
	"maps"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Kind identifies what happened in an [Event].
type Kind uint8

// The kinds. All but Collective are parts of the work of a replica, one after the other; collectives overlap them.
const (
	Other      Kind = iota
	Compile         // building the model's programs
	Start           // sending the chief's initial values to all workers
	Input           // waiting for the next batch of the dataset
	Forward         // the forward pass, and the backward pass up to the first bucket of gradients
	Backward        // the backward pass of a further bucket
	Wait            // waiting for collective calls: communication that computation does not hide
	Update          // computing new values of the parameters
	Commit          // making them visible
	Callbacks       // between two steps
	Evaluate        // evaluating one batch
	Predict         // predicting one batch
	Snapshot        // copying the training state
	Restore         // reading a snapshot
	Outer           // an outer step of DiLoCo
	Collective      // a collective call, from its entry to its end

	KindCount int = iota // number of kinds
)

var kindNames = [KindCount]string{
	"other", "compile", "start", "input", "forward", "backward", "wait", "update", "commit", "callbacks", "evaluate",
	"predict", "snapshot", "restore", "outer step", "collective",
}

// String returns the kind's name, such as "input".
func (k Kind) String() string {
	if int(k) < KindCount {
		return kindNames[k]
	}
	return "unknown"
}

// Event is something that a replica did for a time. Times are as [Recorder.Now] returns them.
type Event struct {
	Kind       Kind
	Replica    int           // in the job
	Step       int64         // of the training, from 1; 0: before the first one
	Start, End time.Duration // since the recorder was made
	// Bucket is the number of the bucket of a Backward event, from 1; 0: none.
	Bucket int `json:",omitempty"`

	// Of a Collective:
	Op        string `json:",omitempty"` // "all_reduce", …
	Algorithm string `json:",omitempty"` // or the library that executed it
	Comm      string `json:",omitempty"` // name of the communicator
	// Seq is the number of the call, the same on all ranks of the communicator: its epoch in the upper 24 bits.
	Seq   uint64 `json:",omitempty"`
	Bytes int64  `json:",omitempty"` // of the whole vector
}

// eventWords is the number of words of an event in a ring.
const eventWords = 6

const (
	eventsKept = 1 << 12 // by default: 224 KiB
	stepsKept  = 1 << 10 // 304 KiB
	eventsMost = 1 << 20 // 56 MiB
)

// Recorder keeps the last events and steps of one worker. Its methods can be called by any goroutine at any time. A
// nil *Recorder records nothing.
type Recorder struct {
	epoch  time.Time
	step   atomic.Int64
	events atomic.Pointer[ring]
	steps  *ring
	ended  atomic.Int64 // when the last step ended

	trainers atomic.Int64

	training atomic.Pointer[Training]
	links    atomic.Pointer[func() [LinksMax]Link]

	names atomic.Pointer[nameTable]
	mu    sync.Mutex // serializes changes of names
}

// nameTable numbers strings. It is replaced, never changed.
type nameTable struct {
	number map[string]uint64
	name   []string
}

// NewRecorder returns an empty recorder.
func NewRecorder() *Recorder {
	r := &Recorder{epoch: time.Now(), steps: newRing(stepsKept, stepWidth)}
	r.events.Store(newRing(eventsKept, eventWords))
	r.names.Store(&nameTable{number: map[string]uint64{"": 0}, name: []string{""}})
	return r
}

// Now returns the time since the recorder was made, on the monotonic clock.
func (r *Recorder) Now() time.Duration {
	if r == nil {
		return 0
	}
	return time.Since(r.epoch)
}

// Keep makes room for at least n events, of at most 2^20. It drops those recorded so far if there was less room.
func (r *Recorder) Keep(n int) {
	n = min(n, eventsMost)
	if old := r.events.Load(); uint64(n) > old.mask+1 {
		r.events.Store(newRing(n, eventWords))
	}
}

// Room returns the number of events that the recorder keeps.
func (r *Recorder) Room() int { return int(r.events.Load().mask + 1) }

// NewTrainer returns the number of a new trainer whose steps are recorded, from 1. Steps of several trainers have the
// same numbers; the number of the trainer distinguishes them.
func (r *Recorder) NewTrainer() int {
	if r == nil {
		return 0
	}
	return int(r.trainers.Add(1))
}

// SetStep sets the step of the events that are added without one.
func (r *Recorder) SetStep(step int64) {
	if r != nil {
		r.step.Store(step)
	}
}

// Add records an event. An event without a step gets that of SetStep.
func (r *Recorder) Add(e Event) {
	if r == nil {
		return
	}
	if e.Step == 0 {
		e.Step = r.step.Load()
	}
	record := [eventWords]uint64{
		uint64(e.Start), uint64(e.End), uint64(e.Step)<<8 | uint64(e.Kind),
		uint64(e.Replica)<<36 | uint64(uint32(e.Bucket)), uint64(e.Bytes), e.Seq,
	}
	if e.Kind == Collective { // it has no bucket
		record[3] = uint64(e.Replica)<<36 | r.number(e.Op)<<24 | r.number(e.Comm)<<12 | r.number(e.Algorithm)
	}
	r.events.Load().add(record[:])
}

// namesMost bounds the number of different names, for which an event has 12 bits.
const namesMost = 1 << 12

// number returns the number of a name. More names than there is room for are empty.
func (r *Recorder) number(name string) uint64 {
	if n, ok := r.names.Load().number[name]; ok {
		return n
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.names.Load()
	if n, ok := old.number[name]; ok {
		return n
	}
	if len(old.name) == namesMost {
		return 0
	}
	table := &nameTable{number: maps.Clone(old.number), name: append(old.name[:len(old.name):len(old.name)], name)}
	table.number[name] = uint64(len(old.name))
	r.names.Store(table)
	return uint64(len(old.name))
}

// Events returns the events that are kept, in the order in which they ended, about.
func (r *Recorder) Events() (list []Event) {
	if r == nil {
		return nil
	}
	r.events.Load().last(0, func(w []uint64) {
		e := Event{
			Start: time.Duration(w[0]), End: time.Duration(w[1]), Step: int64(w[2] >> 8), Kind: Kind(w[2] & 255),
			Replica: int(w[3] >> 36), Bytes: int64(w[4]), Seq: w[5],
		}
		if e.Kind != Collective {
			e.Bucket = int(uint32(w[3]))
		} else {
			names := r.names.Load().name
			e.Op, e.Comm, e.Algorithm = names[w[3]>>24%namesMost], names[w[3]>>12%namesMost], names[w[3]%namesMost]
		}
		list = append(list, e)
	})
	return list
}

// Dropped returns how many events were lost because too many were added at the same time.
func (r *Recorder) Dropped() int { return int(r.events.Load().dropped.Load()) }

// Training is the progress of the training of a worker.
type Training struct {
	Epoch  int `json:"epoch"`  // from 1
	Epochs int `json:"epochs"` // planned; 0: unknown
	// Step counts the steps of the epoch, of Steps; -1: unknown.
	Step  int `json:"step"`
	Steps int `json:"steps"`
	// Loss is the mean over the epoch so far; nil: it is not finite.
	Loss *float64 `json:"loss"`
	// Metrics are means over the epoch so far. Those that are not finite are left out.
	Metrics map[string]float64 `json:"metrics"`
	// Validation has the finite numbers of the latest validation, with the loss as "loss"; nil: none yet.
	Validation map[string]float64 `json:"validation,omitempty"`
	// Unit names what a step's examples are, such as "images".
	Unit string `json:"unit,omitempty"`
	// LearningRate is that of the last update; nil: unknown.
	LearningRate *float64 `json:"learning_rate,omitempty"`
	// Elapsed is the time since this process began to train, and Left an estimate of the rest, by the mean time of a step
	// with all that happens between steps; both in seconds. Left is nil if it is unknown.
	Elapsed float64  `json:"elapsed_seconds"`
	Left    *float64 `json:"left_seconds,omitempty"`
	// Settings describe the training: names and values.
	Settings map[string]string `json:"settings,omitempty"`
	// Trainer is the number of the trainer, as in [Step].
	Trainer int `json:"trainer"`
	// Measured are the last measurements, at most [MeasurementsMax], in the order of their steps.
	Measured []Measurement `json:"measured,omitempty"`
}

// MeasurementsMax is the most measurements of a [Training].
const MeasurementsMax = 16

// Measurement is what was measured at a step, besides the loss of its batch.
type Measurement struct {
	Step int64 `json:"step"` // as in [Step]
	// Metrics are means over the epoch up to this step. Those that are not finite are left out.
	Metrics      map[string]float64 `json:"metrics,omitempty"`
	LearningRate *float64           `json:"learning_rate,omitempty"` // nil: unknown
	// Validation has the finite numbers of the validation after this step, with the loss as "loss"; nil: none.
	Validation map[string]float64 `json:"validation,omitempty"`
}

// SetTraining sets the progress of the training. The recorder takes ownership.
func (r *Recorder) SetTraining(t *Training) {
	if r != nil {
		r.training.Store(t)
	}
}

// Training returns the progress of the training; nil: unknown. It must not be changed.
func (r *Recorder) Training() *Training {
	if r == nil {
		return nil
	}
	return r.training.Load()
}

// Step records where the time of one training step went, on the first replica of a worker. A step begins when the
// previous one was committed, so that callbacks between steps belong to the next one.
type Step struct {
	Step       int64         // from 1
	Start, End time.Duration // since the recorder was made
	// The parts of End-Start. What none of them covers is other work of the worker.
	Input     time.Duration // waiting for the batch
	Compute   time.Duration // forward and backward
	Wait      time.Duration // waiting for collective calls: communication that is not hidden, and other workers
	Update    time.Duration // new values, and making them visible
	Callbacks time.Duration // between steps
	Evaluate  time.Duration // validation
	Snapshot  time.Duration // taking snapshots

	Examples int     // of the global batch
	Loss     float64 // of the global batch; NaN: unknown
	Trainer  int     // see [Recorder.NewTrainer]; 0: unknown

	// Links has the network links with other workers that had most to do in the step. One without times and bytes is
	// none.
	Links [LinksMax]Link
}

// Own returns the time that the worker spent on its own work, not waiting for collective calls: the time from the end
// of one to the entry into the next.
func (s Step) Own() time.Duration { return s.End - s.Start - s.Wait }

const (
	linkWords = 4
	stepWords = 13 // without links
	stepWidth = stepWords + LinksMax*linkWords
)

// MeasureLinks sets the function that returns what the links of this worker did since its last call. Each AddStep calls
// it. It must not block, and may be called by several goroutines.
func (r *Recorder) MeasureLinks(read func() [LinksMax]Link) {
	if r != nil {
		r.links.Store(&read)
	}
}

// AddStep records a step. Its Start is set to the end of the previous step if it is 0, and its Links are measured if
// MeasureLinks was called.
func (r *Recorder) AddStep(s Step) {
	if r == nil {
		return
	}
	if before := r.ended.Swap(int64(s.End)); s.Start == 0 {
		s.Start = time.Duration(before)
	}
	if read := r.links.Load(); read != nil {
		s.Links = (*read)()
	}
	record := [stepWidth]uint64{
		uint64(s.Step), uint64(s.Start), uint64(s.End), uint64(s.Input), uint64(s.Compute), uint64(s.Wait),
		uint64(s.Update), uint64(s.Callbacks), uint64(s.Evaluate), uint64(s.Snapshot), uint64(s.Examples),
		math.Float64bits(s.Loss), uint64(s.Trainer),
	}
	for i, l := range s.Links {
		copy(record[stepWords+i*linkWords:], []uint64{
			uint64(l.Peer), uint64(l.Sending), uint64(l.Receiving), uint64(l.Bytes),
		})
	}
	r.steps.add(record[:])
}

// Steps returns the steps recorded after number n, of those that are kept, oldest first, and the number to pass next
// time. Number 0 is before all.
func (r *Recorder) Steps(n uint64) (list []Step, last uint64) {
	if r == nil {
		return nil, 0
	}
	last = r.steps.last(n, func(w []uint64) {
		s := Step{
			Step: int64(w[0]), Start: time.Duration(w[1]), End: time.Duration(w[2]), Input: time.Duration(w[3]),
			Compute: time.Duration(w[4]), Wait: time.Duration(w[5]), Update: time.Duration(w[6]),
			Callbacks: time.Duration(w[7]), Evaluate: time.Duration(w[8]), Snapshot: time.Duration(w[9]),
			Examples: int(w[10]), Loss: math.Float64frombits(w[11]), Trainer: int(w[12]),
		}
		for i := range s.Links {
			l := w[stepWords+i*linkWords:]
			s.Links[i] = Link{
				Peer: int(l[0]), Sending: time.Duration(l[1]), Receiving: time.Duration(l[2]), Bytes: int64(l[3]),
			}
		}
		list = append(list, s)
	})
	return list, last
}
