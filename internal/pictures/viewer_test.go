package pictures

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/browser"
)

// viewerPage shows a trace in the viewer of chrome://tracing, as its documentation for embedding says. It needs HTML
// imports, for which Go's distribution has a substitute too.
const viewerPage = `<!DOCTYPE html>
<html><head>
<script src="/viewer/webcomponents.min.js"></script>
<link rel="import" href="/viewer/trace_viewer_full.html">
<style>html, body, #viewer { width: 100%; height: 100%; margin: 0; overflow: hidden }</style>
<script>
'use strict';
document.addEventListener('WebComponentsReady', async () => {
  const container = document.createElement('track-view-container');
  container.id = 'track_view_container';
  const viewer = document.createElement('tr-ui-timeline-view');
  viewer.track_view_container = container;
  Polymer.dom(viewer).appendChild(container);
  viewer.id = 'viewer';
  viewer.globalMode = true;
  Polymer.dom(document.body).appendChild(viewer);
  const model = new tr.Model();
  try {
    await new tr.importer.Import(model).importTraces([await (await fetch('/trace.json')).text()]);
  } catch (e) {
    window.failure = String(e);
    return;
  }
  viewer.model = model;
  viewer.viewTitle = 'Lockstep';
  window.model = model;
});
</script>
</head><body></body></html>`

// showTrace opens a trace in Chromium's trace viewer. Chromium has its page, chrome://tracing, no longer; Go's
// distribution has the viewer for go tool trace.
func showTrace(t *testing.T, trace string, width, height int) *browser.Browser {
	t.Helper()
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	viewer := filepath.Join(strings.TrimSpace(string(root)), "src", "internal", "trace", "traceviewer", "static")
	if _, err := os.Stat(filepath.Join(viewer, "trace_viewer_full.html")); err != nil {
		t.Skipf("Go's distribution has no trace viewer: %v", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/viewer/", http.StripPrefix("/viewer/", http.FileServer(http.Dir(viewer))))
	mux.HandleFunc("/trace.json", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, trace) })
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte(viewerPage)) // the browser reports what is missing
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	b := browser.Open(t)
	b.Visit(server.URL, width, height)
	b.Await(`window.model !== undefined || window.failure !== undefined`)
	if failure := b.Eval(`window.failure || ''`); failure != "" {
		t.Fatalf("the viewer cannot read the trace: %v", failure)
	}
	return b
}

// showSteps hides the viewer's remarks, and shows the time from the first to the last event of the category commit.
const showSteps = `(() => {
  const viewer = document.querySelector('tr-ui-timeline-view');
  Polymer.dom(viewer.root).querySelector('#polyfill-warning').clearMessages();
  const ends = [];
  for (const thread of model.getAllThreads())
    for (const slice of thread.sliceGroup.slices) if (slice.category === 'commit') ends.push(slice.end);
  const view = viewer.trackView.viewport;
  const shown = new tr.ui.TimelineDisplayTransform();
  const width = view.modelTrackContainer.canvas.clientWidth;
  shown.xSetWorldBounds(Math.min(...ends) - 0.5, Math.max(...ends) + 0.5, width);
  view.setDisplayTransformImmediately(shown);
  return ends.length;
})()`

// TestTraceViewer checks that Chromium's trace viewer reads the trace of a training without a warning, and shows each
// replica and its calls.
func TestTraceViewer(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it starts a browser")
	}
	trace := filepath.Join(t.TempDir(), "trace.json")
	train := exec.Command("go", "run", "../../cmd/lockstep", "train", "--replicas", "2", "--model", "mlp", "--hidden", "8",
		"--steps", "6", "--trace-steps", "3", "--trace", trace)
	if out, err := train.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := showTrace(t, trace, 1000, 420)
	b.Await(`document.body.innerText.includes('worker 0') && document.body.innerText.includes('replica 1 calls')`)
	if warnings := b.Eval(`JSON.stringify(model.importWarnings)`); warnings != "[]" {
		t.Errorf("the viewer warns: %v", warnings)
	}
	want := `["replica 0","replica 0 calls","replica 1","replica 1 calls"]`
	rows := b.Eval(`JSON.stringify(model.getAllThreads().filter(t => t.sliceGroup.length > 2).map(t => t.name))`)
	if rows != want {
		t.Errorf("the viewer has the rows %v, want %s", rows, want)
	}
	if n := b.Eval(showSteps); n != 3.0 {
		t.Errorf("the viewer has %v steps of replica 0, want 3", n)
	}
}
