package pictures

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/timeline/timelinetest"
)

// colors are those of the categories in a drawn trace.
var colors = map[string]string{
	"input": "#a5620f", "forward": "#1259a7", "backward": "#3b82c4", "wait": "#c9ced8", "update": "#1b7a3e",
	"commit": "#5aa66f", "collective": "#7a3e9d", "callbacks": "#6b7078",
}

// drawTrace draws the last steps of a trace as SVG: a row for each thread, and below it what its spans contain.
func drawTrace(t *timelinetest.Trace, steps float64) string {
	const left, width, row = 130, 770, 22
	first, last := math.Inf(1), 0.0
	newest := 0.0
	for i := range t.Events {
		if step, ok := t.Events[i].Args["step"].(float64); ok && t.Events[i].Category == "commit" {
			newest = max(newest, step)
		}
	}
	shown := func(e *timelinetest.Event) bool {
		step, ok := e.Args["step"].(float64)
		return e.Phase == "X" && ok && step > newest-steps && step <= newest && colors[e.Category] != ""
	}
	for i := range t.Events {
		if e := &t.Events[i]; shown(e) {
			first, last = min(first, *e.Start), max(last, e.End())
		}
	}
	scale := width / (last - first)
	keys := make([][2]int, 0, len(t.Threads))
	for key := range t.Threads {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b [2]int) int { return slices.Compare(a[:], b[:]) })
	var b strings.Builder
	y := 34
	for _, key := range keys {
		fmt.Fprintf(&b, `<text x="8" y="%d">worker %d, %s</text>`+"\n", y+14, key[0],
			map[bool]string{true: "calls", false: "work"}[strings.HasSuffix(t.Threads[key], "calls")])
		for i := range t.Events {
			e := &t.Events[i]
			if !shown(e) || *e.Process != key[0] || *e.Thread != key[1] {
				continue
			}
			x, w := left+(*e.Start-first)*scale, max(*e.Duration*scale, 0.5)
			fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"><title>%s, %.0f µs</title></rect>`+"\n",
				x, y, w, row-4, colors[e.Category], html.EscapeString(e.Name), *e.Duration)
		}
		y += row
	}
	var legend strings.Builder
	x := left
	for _, name := range []string{"input", "forward", "backward", "wait", "update", "commit", "callbacks", "collective"} {
		fmt.Fprintf(&legend, `<rect x="%d" y="10" width="12" height="12" fill="%s"/><text x="%d" y="21">%s</text>`+"\n", x,
			colors[name], x+17, name)
		x += 34 + 7*len(name)
	}
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" `+
		`font-size="12" fill="#22262b">`+"\n<title>The last steps of a trace: %.1f ms</title>\n"+
		`<rect width="100%%" height="100%%" fill="#ffffff"/>`+"\n%s%s"+
		`<text x="%d" y="%d">0 ms</text><text x="%d" y="%d" text-anchor="end">%.1f ms</text>`+"\n</svg>\n",
		left+width+10, y+22, (last-first)/1e3, legend.String(), b.String(), left, y+14, left+width, y+14, (last-first)/1e3)
}
