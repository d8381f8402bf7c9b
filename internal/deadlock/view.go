package deadlock

import (
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// view finds the replicas' goroutines in one snapshot of all.
type view struct {
	run      *Run
	self     *stacks.Goroutine // the one that found the failure
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

// goroutine returns the goroutine that acts for a replica: if it is in a call, the one that made it, which may be one
// that the replica's own goroutine started, directly or not. It returns nil if there is none.
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

// inLibrary reports whether the innermost call that is not the standard library's is Lockstep's.
func inLibrary(g *stacks.Goroutine) bool {
	for _, f := range g.Frames {
		if !f.Standard() {
			return f.Library()
		}
	}
	return false
}

// siteOf returns the innermost frame of the user's. If there is none, it is the user's go statement that started the
// goroutine in the library, as in go replica.AllReduce(…), or else the innermost frame outside the layers that every
// call goes through.
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

// firstUser returns the innermost frame of the user's.
func firstUser(frames []stacks.Frame) Frame {
	for _, f := range frames {
		if !f.Standard() && !f.Library() {
			return f
		}
	}
	return Frame{}
}

// Site returns the place in the user's code from where the calling goroutine has come into the library; zero if unknown.
func Site() Frame {
	self := stacks.Self()
	return siteOf(&self)
}

// callers returns the next user's frames that led to a call's site: a helper's caller tells more than the helper.
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

// userPart cuts off what is not the user's at both ends of a stack: the runtime's calls and, unless it died there, the
// library's at the top, of the standard library's all but the one that the user made, and at the foot what called the
// user's function. What is not the user's in between stays, except for the layers that every call goes through. A stack
// without any of the user's calls stays whole.
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

// isCore reports whether a library frame is of the layers that every call goes through.
func isCore(f stacks.Frame) bool {
	rest := strings.TrimPrefix(f.Func, strings.TrimSuffix(packagePath(), "internal/deadlock"))
	for _, room := range []string{"internal/", "collective.", "collective/", "transport.", "transport/", "distribute."} {
		if strings.HasPrefix(rest, room) {
			return true
		}
	}
	return false
}

// packagePath is the path of this package.
var packagePath = sync.OnceValue(func() string { return reflect.TypeFor[Run]().PkgPath() })
