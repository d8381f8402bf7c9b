package monitor

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/dashboard"
	"github.com/lockstep-ml/lockstep/timeline"
)

// TestTop shows a job by the address of its page, with its token, and reads each point once for a table.
func TestTop(t *testing.T) {
	tracker := status.NewTracker("digits", nil)
	add := func(from, to int64) {
		r := timeline.Report{Host: "node", PID: 1}
		for i := from; i <= to; i++ {
			at := time.Duration(i) * time.Millisecond
			r.Steps = append(r.Steps, timeline.Step{Step: i, Start: at - time.Millisecond, End: at, Examples: 64})
		}
		tracker.Report(0, r)
	}
	add(1, 60)
	server, err := dashboard.Listen("127.0.0.1:0", tracker, "secret")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	address, _, _ := strings.Cut(server.URL(), "?")
	show := func(o topFlags, address string) (string, error) {
		var out strings.Builder
		o.every, o.once = time.Second, true
		err := o.run(t.Context(), &out, []string{address})
		return out.String(), err
	}
	if out, err := show(topFlags{format: "table"}, server.URL()); err != nil ||
		!strings.HasPrefix(out, "digits: step 60, 64,000 examples/s, 1.0 ms/step, 0 restarts\nworker  host ") {
		t.Errorf("%v:\n%s", err, out)
	}
	if out, err := show(topFlags{format: "json"}, server.URL()); err != nil || strings.Count(out, `"loss"`) != 60 {
		t.Errorf("%v, not all points:\n%s", err, out)
	}
	if out, err := show(topFlags{format: "table"}, address); err == nil ||
		!strings.Contains(err.Error(), "needs its token") {
		t.Errorf("without the token: %v\n%s", err, out)
	}
	t.Setenv(TokenEnv, "secret")
	if _, err := show(topFlags{format: "table"}, strings.TrimPrefix(address, "http://")); err != nil {
		t.Errorf("with the token of the environment: %v", err)
	}
	query, err := findJob(t.Context(), []string{server.URL()})
	if err != nil {
		t.Fatal(err)
	}
	if m, _, err := query.Read(t.Context(), false); err != nil || len(m.Points) != 60 {
		t.Errorf("%v, %d points: want 60 at first", err, len(m.Points))
	}
	add(61, 63)
	if m, _, err := query.Read(t.Context(), false); err != nil || len(m.Points) != 3 || m.Job.Step != 63 {
		t.Errorf("%v, then %d points, step %d: want the 3 new ones", err, len(m.Points), m.Job.Step)
	}
	if m, _, err := query.Read(t.Context(), true); err != nil || len(m.Points) != 63 {
		t.Errorf("%v, %d points: want all", err, len(m.Points))
	}
}

// TestTopOfNames: a name may look like an address, and is found where it is one of a job.
func TestTopOfNames(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", "")
	dir, err := os.MkdirTemp("", "j") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("TMPDIR", dir)
	for _, name := range []string{"team/digits", "localhost:80"} {
		server, err := dashboard.ListenLocal(name, status.NewTracker(name, nil))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { server.Close() })
	}
	for name, want := range map[string]string{
		"team/digits": "http://localhost/api/job", "localhost:80": "http://localhost/api/job",
		"team":                "http://localhost/api/job", // the first letters
		"localhost:81":        "http://localhost:81/api/job",
		"http://localhost:80": "http://localhost:80/api/job",
		"team/other":          "http://team/api/job",
	} {
		q, err := findJob(t.Context(), []string{name})
		if err != nil || q.URL() != want {
			t.Errorf("%s: %v, error %v, want %s", name, q, err, want)
		}
	}
}

// TestTopOfStrangers: what is not a job's page is an error that cannot control the terminal.
func TestTopOfStrangers(t *testing.T) {
	for answer, want := range map[string]string{
		"404 \x1b[2Jhere": "answers 404 Not Found: \uFFFD[2Jhere",
		"200 \x1b[2J":     "is not the dashboard of a job",
		"200 {}":          "is not the dashboard of a job",
	} {
		code, text, _ := strings.Cut(answer, " ")
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if code == "404" {
				w.WriteHeader(http.StatusNotFound)
			}
			_, _ = w.Write([]byte(text)) // the client reports what is missing
		}))
		o := topFlags{every: time.Second, once: true, format: "table"}
		if err := o.run(t.Context(), io.Discard, []string{server.URL}); err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%q: error %q, want %q", answer, err, want)
		}
		server.Close()
	}
}
