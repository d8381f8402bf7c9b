package elementwise

import (
	"sync"
	"sync/atomic"
	"unsafe"
)

// Job is one run of a program over n elements.
type Job struct {
	Program *Program
	In, Out []unsafe.Pointer // by input and output; an output must not overlap an input or another output
	Numbers []Number         // by number
	N       int
}

// chunk is the number of elements that a goroutine takes at once.
const chunk = 64 * block

// Pool bounds the goroutines of several calls of Run at the same time. The zero value has none besides the callers'.
type Pool struct {
	helpers chan struct{} // a token for each that runs
	scratch sync.Pool     // of *scratch
}

// NewPool returns a pool of so many goroutines besides the callers'.
func NewPool(helpers int) *Pool { return &Pool{helpers: make(chan struct{}, max(helpers, 0))} }

// scratch is the memory of one goroutine.
type scratch struct {
	pointers []unsafe.Pointer
	memory   []uint64
}

// work is the state of one call of Run. A goroutine that starts late finds no chunk left.
type work struct {
	pool   *Pool
	jobs   []Job
	chunks int
	next   atomic.Int64 // chunk
	left   sync.WaitGroup
}

// Run runs the jobs on the calling goroutine and those of the pool that are free. It returns when all outputs are
// written.
func (p *Pool) Run(jobs []Job) {
	w := &work{pool: p, jobs: jobs}
	for i := range jobs {
		w.chunks += jobs[i].chunks()
	}
	w.left.Add(w.chunks)
	for range w.chunks - 1 {
		select {
		case p.helpers <- struct{}{}:
			go w.help()
			continue
		default:
		}
		break
	}
	w.take()
	w.left.Wait()
}

func (w *work) help() {
	w.take()
	<-w.pool.helpers
}

func (j *Job) chunks() int { return (j.N + chunk - 1) / chunk }

// take runs chunks until none is left.
func (w *work) take() {
	var s *scratch
	job, before := 0, 0 // the chunks of the jobs before job
	for {
		i := int(w.next.Add(1)) - 1
		if i >= w.chunks {
			break
		}
		for i-before >= w.jobs[job].chunks() {
			before += w.jobs[job].chunks()
			job++
		}
		j := &w.jobs[job]
		if s == nil {
			if s, _ = w.pool.scratch.Get().(*scratch); s == nil {
				s = &scratch{}
			}
		}
		s.fit(j.Program)
		from := (i - before) * chunk
		j.Program.run(j, span{from, min(j.N, from+chunk)}, s.pointers, unsafe.Pointer(unsafe.SliceData(s.memory)))
		w.left.Done()
	}
	if s != nil {
		clear(s.pointers)
		w.pool.scratch.Put(s)
	}
}

func (s *scratch) fit(p *Program) {
	if n := len(p.values); len(s.pointers) < n {
		s.pointers = make([]unsafe.Pointer, n)
	}
	if n := p.buffers * room / 8; len(s.memory) < n {
		s.memory = make([]uint64, n)
	}
}
