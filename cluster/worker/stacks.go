package worker

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// A worker answers a request for its goroutines' stacks from a separate goroutine, so it can answer when its
// training goroutine is stuck. A request sets the worker's "ask" key, then waits for the next change of its
// "answer" key.

// answer answers such requests until the worker leaves.
func (w *Worker) answer(ctx context.Context) error {
	ask := w.key("stacks", w.job.Worker, "ask")
	_, after, err := w.store.List(ctx, ask)
	for err == nil {
		if _, after, err = w.store.Changes(ctx, ask, after); err == nil {
			err = w.store.Set(ctx, w.key("stacks", w.job.Worker, "answer"), []byte(stacksText(stacks.Snapshot(), answerFrames)))
		}
	}
	return err
}

// stacksOf returns a worker's answer, or "" if there is none within stacksWait.
func (w *Worker) stacksOf(ctx context.Context, worker int) string {
	ctx, cancel := context.WithTimeout(ctx, stacksWait)
	defer cancel()
	answer := w.key("stacks", worker, "answer")
	_, after, err := w.store.List(ctx, answer)
	if err != nil {
		return ""
	}
	if err := w.store.Set(ctx, w.key("stacks", worker, "ask"), []byte(w.name(w.job.Worker))); err != nil {
		return ""
	}
	entries, _, err := w.store.Changes(ctx, answer, after)
	if err != nil || len(entries) == 0 {
		return ""
	}
	return clip(string(entries[len(entries)-1].Value), stacksMax)
}

const (
	stacksWait   = 4 * time.Second
	stacksMax    = 8 << 10 // bytes
	answerFrames = 10      // of each goroutine
	answerMost   = 4       // goroutines
)

// stacksText formats the goroutines that can explain why a process makes no progress: those in the user's
// code, running ones first, then those started by a strategy. Each has one line, and one for each call in the
// user's part of its stack.
func stacksText(all []stacks.Goroutine, frames int) string {
	var shown []*stacks.Goroutine
	for i := range all {
		if g := &all[i]; slices.ContainsFunc(g.Frames, stacks.Frame.User) && !answers(g) {
			shown = append(shown, g)
		}
	}
	slices.SortStableFunc(shown, func(a, b *stacks.Goroutine) int { return weight(a) - weight(b) })
	var b strings.Builder
	for _, g := range shown[:min(len(shown), answerMost)] {
		state := g.State
		if g.Minutes > 0 {
			state += fmt.Sprintf(", %d minutes", g.Minutes)
		}
		fmt.Fprintf(&b, "goroutine %d [%s]\n", g.ID, state)
		part := userPart(g.Frames)
		for _, f := range part[:min(len(part), frames)] {
			fmt.Fprintf(&b, "  %v\n", f)
		}
		if n := len(part) - frames; n > 0 {
			fmt.Fprintf(&b, "  … %d more\n", n)
		}
	}
	if n := len(shown) - answerMost; n > 0 {
		fmt.Fprintf(&b, "… %d more goroutines\n", n)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// answers reports whether a goroutine is the one that produces the answer.
func answers(g *stacks.Goroutine) bool {
	return slices.ContainsFunc(g.Frames,
		func(f stacks.Frame) bool { return strings.HasSuffix(f.Func, "/worker.(*Worker).answer") })
}

// weight orders goroutines: running before blocked, replicas before others.
func weight(g *stacks.Goroutine) int {
	n := 0
	switch g.State {
	case "running", "runnable", "syscall":
	default:
		n += 2
	}
	if !slices.ContainsFunc(g.Frames, replicas) {
		n++
	}
	return n
}

// replicas reports whether a frame calls the step function of a replica.
func replicas(f stacks.Frame) bool {
	return strings.HasSuffix(f.Func, "/distribute/internal/deadlock.(*Run).Do")
}

// userPart drops the frames that called the step function, and the runtime's frames at the top.
func userPart(frames []stacks.Frame) []stacks.Frame {
	for len(frames) > 1 && strings.HasPrefix(frames[0].Func, "runtime.") {
		frames = frames[1:]
	}
	if foot := slices.IndexFunc(frames, replicas); foot > 0 {
		frames = frames[:foot]
		for len(frames) > 1 && frames[len(frames)-1].Library() {
			frames = frames[:len(frames)-1]
		}
	}
	return frames
}
