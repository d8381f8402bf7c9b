// Package timeline records what a worker does in time: where a step spends it, and each collective call. It knows no
// tensor, no network and no engine; package train and package collective write into a [Recorder], and others read it:
// the trace of `lockstep train --trace`, the live page, reports, and the search for the worker that slows a job down.
//
//	r := timeline.NewRecorder()
//	start := r.Now()
//	work()
//	r.Add(timeline.Event{Kind: timeline.Forward, Step: 17, Start: start, End: r.Now()})
//	for _, e := range r.Events() { … }
//
// A [Recorder] keeps the last events and the last steps in rings of fixed-size records: recording allocates nothing,
// takes no lock and costs well under a microsecond. A [Timeline] joins those of all workers on one clock; a [Writer]
// writes it in Chrome's trace format. A [Detector] finds the straggler.
package timeline
