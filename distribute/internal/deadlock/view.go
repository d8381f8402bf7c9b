package deadlock

import (
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// view finds the goroutines of the replicas in a snapshot of all goroutines.
type view struct {
	run      *Run
	self     *stacks.Goroutine // the goroutine that found the failure
	byID     map[uint64]*stacks.Goroutine
	children map[uint64][]*stacks.Goroutine
}

func newView(r *Run) *view {
	all := stacks.Snapshot()
	v := &view{run: r, byID: make(map[uint64]*stacks.Goroutine), children: make(map[uint64][]*stacks.Goroutine)}
	for i := range all {
		g := &all[i]
		v.byID[g.ID] = g
		v.children[g.Creator] = append(v.children[g.Creator], g)
	}
	if len(all) > 0 {
		v.self = &all[0]
	}
	return v
}

// goroutine returns the goroutine that acts for a replica, or nil. If the replica is in a call, it is the goroutine
// that made the call, which the replica's goroutine may have started, directly or indirectly.
func (v *view) goroutine(replica int, inCall bool, f fault) *stacks.Goroutine {
	id := v.run.replicas[replica].goroutine.Load()
	own := v.byID[id]
	if id == 0 || !inCall {
		return own
	}
	if f.kind == faultFound && f.replica == replica && v.self != nil && siteOf(v.self) != (Frame{}) {
		return v.self
	}
	second := f.kind == faultBusy && f.replica == replica // then self made the other call
	seen := map[uint64]bool{id: true}
	for i := range v.run.replicas {
		seen[v.run.replicas[i].goroutine.Load()] = true
	}
	for queue := []uint64{id}; len(queue) > 0; queue = queue[1:] {
		g := v.byID[queue[0]]
		if g != nil && !(second && g == v.self) && inLibrary(g) {
			return g
		}
		for _, child := range v.children[queue[0]] {
			if !seen[child.ID] {
				seen[child.ID] = true
				queue = append(queue, child.ID)
			}
		}
	}
	return own
}

// inLibrary reports whether the innermost frame outside the standard library is Lockstep's.
func inLibrary(g *stacks.Goroutine) bool {
	for _, f := range g.Frames {
		if !f.Standard() {
			return f.Library()
		}
	}
	return false
}

// siteOf returns the innermost frame of user code. If there is none, it returns the user's go statement that started
// the goroutine in the library, as in go replica.AllReduce(…), or else the innermost frame outside the layers that
// every call goes through.
func siteOf(g *stacks.Goroutine) Frame {
	if site := firstUser(g.Frames); site != (Frame{}) {
		return site
	}
	if site := firstUser([]stacks.Frame{g.CreatedBy}); site != (Frame{}) {
		return site
	}
	for _, f := range g.Frames {
		if f.Library() && !isCore(f) {
			return f
		}
	}
	return Frame{}
}

// firstUser returns the innermost frame of user code, or zero.
func firstUser(frames []stacks.Frame) Frame {
	for _, f := range frames {
		if !f.Standard() && !f.Library() {
			return f
		}
	}
	return Frame{}
}

// Site returns the frame of user code that called into the library on the calling goroutine; zero if unknown.
func Site() Frame {
	self := stacks.Self()
	return siteOf(&self)
}

// callers returns the next user frame that called site: for a helper function its caller is more informative.
func callers(frames []stacks.Frame, site Frame) []Frame {
	const shown = 1
	var out []Frame
	seen := false
	for _, f := range frames {
		switch {
		case f == site:
			seen = true
		case seen && len(out) < shown && !f.Standard() && !f.Library():
			out = append(out, f)
		}
	}
	return out
}

// userPart removes the frames outside user code at both ends of a stack. At the top these are the runtime's frames
// and, unless the replica died there, the library's; of the standard library's it keeps the one that user code
// called. At the bottom these are the callers of the user's function. In between it keeps other frames, except for
// the layers that every call goes through. A stack without user frames stays whole.
func userPart(frames []stacks.Frame, died bool) []stacks.Frame {
	for i, f := range frames {
		if f.Func == "panic" || f.Func == "runtime.Goexit" {
			frames = frames[i+1:]
			break
		}
	}
	for len(frames) > 0 && strings.HasPrefix(frames[0].Func, "runtime.") {
		frames = frames[1:]
	}
	foot := len(frames)
	for i, f := range frames {
		if f.Func == packagePath()+".(*Run).Do" {
			foot = i
			break
		}
	}
	for foot > 0 && frames[foot-1].Library() {
		foot--
	}
	first := slices.IndexFunc(frames[:foot], func(f stacks.Frame) bool { return !f.Standard() && !f.Library() })
	if first < 0 {
		return frames
	}
	out := make([]stacks.Frame, 0, foot)
	if died {
		out = append(out, frames[:first]...)
	} else if first > 0 && frames[first-1].Standard() {
		out = append(out, frames[first-1])
	}
	for _, f := range frames[first:foot] {
		if !f.Library() || !isCore(f) {
			out = append(out, f)
		}
	}
	return out
}

// isCore reports whether a library frame belongs to the layers that every call goes through.
func isCore(f stacks.Frame) bool {
	rest := strings.TrimPrefix(f.Func, strings.TrimSuffix(packagePath(), "distribute/internal/deadlock"))
	for _, prefix := range []string{
		"internal/", "collective.", "collective/", "transport.", "transport/", "distribute.",
		"distribute/",
	} {
		if strings.HasPrefix(rest, prefix) {
			return true
		}
	}
	return false
}

// packagePath is the path of this package.
var packagePath = sync.OnceValue(func() string { return reflect.TypeFor[Run]().PkgPath() })
