package dashboard

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/timeline"
)

func TestMain(m *testing.M) {
	queryMax = time.Minute // all servers of the tests answer, on a busy machine too
	goleak.VerifyTestMain(m)
}

// running returns the tracker of a job of four workers, of which worker 2 reads its input slowly.
func running() *status.Tracker {
	t := status.NewTracker("digits", nil)
	for w := range 4 {
		t.Heartbeat(0, w, membership.Heartbeat{Count: 1, Step: 0, Phase: "rendezvous"})
	}
	add(t, 1, 60)
	return t
}

// add adds steps to a job of running.
func add(t *status.Tracker, from, to int) {
	for w := range 4 {
		r := timeline.Report{Worker: w, Host: "node" + string(rune('a'+w)), PID: 100 + w, Memory: 300 << 20, CPU: float64(to)}
		if w == 0 {
			r.Training = &timeline.Training{
				Epoch: 2, Epochs: 5, Step: to, Steps: 100, Loss: new(30 / float64(to+10)),
				Metrics: map[string]float64{"accuracy": 0.9}, Validation: map[string]float64{"loss": 0.4, "accuracy": 0.88},
				LearningRate: new(0.01), Elapsed: float64(to) / 10, Left: new(3723.0), Unit: "images",
				Settings: map[string]string{"model": "resnet18", "global batch": "256"},
			}
			for i := from; i <= to; i++ {
				m := timeline.Measurement{
					Step: int64(i), LearningRate: new(0.01 / float64(i)), Metrics: map[string]float64{"accuracy": 0.9},
				}
				if i%20 == 0 {
					m.Validation = map[string]float64{"loss": 0.4, "accuracy": 0.88}
				}
				r.Training.Measured = append(r.Training.Measured, m)
			}
		}
		for i := from; i <= to; i++ {
			s := timeline.Step{
				Step: int64(i), Start: time.Duration(i-1) * 100 * time.Millisecond, End: time.Duration(i) * 100 * time.Millisecond,
				Input: time.Millisecond, Compute: 60 * time.Millisecond, Update: 2 * time.Millisecond, Examples: 256,
				Loss: 30 / float64(i+10),
			}
			if w == 2 {
				s.Input += 30 * time.Millisecond
			}
			s.Wait = s.End - s.Start - s.Input - s.Compute - s.Update
			r.Steps = append(r.Steps, s)
		}
		t.Report(0, r)
		t.Heartbeat(0, w, membership.Heartbeat{Count: uint64(to + 1), Step: int64(to), Phase: "compute"})
	}
}

// addSlowLink restarts the job, now with a ring in which the link from worker 1 to worker 2 is slow.
func addSlowLink(t *status.Tracker) {
	for w := range 4 {
		t.Heartbeat(1, w, membership.Heartbeat{Count: 1})
	}
	for w := range 4 {
		r := timeline.Report{Worker: w}
		for i := range 60 {
			s := timeline.Step{
				Step: int64(i + 1), Start: time.Duration(i) * 100 * time.Millisecond,
				End: time.Duration(i+1) * 100 * time.Millisecond, Compute: 60 * time.Millisecond, Wait: 40 * time.Millisecond,
			}
			s.Links[0] = timeline.Link{Peer: (w + 1) % 4, Sending: 2 * time.Millisecond, Bytes: 1 << 20}
			s.Links[1] = timeline.Link{Peer: (w + 3) % 4, Receiving: 30 * time.Millisecond}
			if w == 1 {
				s.Links[0].Sending = 30 * time.Millisecond
			}
			r.Steps = append(r.Steps, s)
		}
		t.Report(1, r)
	}
}

func open(t *testing.T, address, token string) (*Server, *status.Tracker) {
	t.Helper()
	source := running()
	s, err := Listen(address, source, token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return s, source
}

func get(t *testing.T, url string, change func(*http.Request)) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(r)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

func TestJSON(t *testing.T) {
	s, _ := open(t, "127.0.0.1:0", "")
	code, text := get(t, s.URL()+"api/job", nil)
	var m Message
	if err := json.Unmarshal([]byte(text), &m); err != nil || code != http.StatusOK {
		t.Fatalf("%d %s: %v", code, text, err)
	}
	j := m.Job
	if j.Version != 1 || j.Job != "digits" || len(j.Workers) != 4 || j.Step != 60 || j.ExamplesPerSecond != 2560 ||
		j.Training.Epoch != 2 || len(m.Points) != 60 || m.Series != 1 {
		t.Errorf("got %+v with %d points", j, len(m.Points))
	}
	if j.Straggler == nil || j.Straggler.Worker != 2 || j.Straggler.Cause != "input" {
		t.Errorf("straggler %+v: want worker 2, input", j.Straggler)
	}
	if w := j.Workers[2]; w.State != "running" || w.Host != "nodec" || w.Input < 0.3 || w.Memory != 300<<20 {
		t.Errorf("worker 2: %+v", w)
	}
	_, text = get(t, s.URL()+"api/job?after=50&series=1", nil)
	if err := json.Unmarshal([]byte(text), &m); err != nil || len(m.Points) != 10 {
		t.Errorf("%d points after step 50, %v: want 10", len(m.Points), err)
	}
}

func TestEvents(t *testing.T) {
	s, source := open(t, "127.0.0.1:0", "")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL()+"api/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, 1<<20)
	next := func() (m Message) {
		for lines.Scan() {
			if text, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				if err := json.Unmarshal([]byte(text), &m); err != nil {
					t.Fatal(err)
				}
				return m
			}
		}
		t.Fatalf("the stream ended: %v", lines.Err())
		return m
	}
	if m := next(); len(m.Points) != 60 {
		t.Errorf("%d points at first, want 60", len(m.Points))
	}
	add(source, 61, 70)
	if m := next(); len(m.Points) != 10 || m.Job.Step != 70 {
		t.Errorf("then %d points, step %d: want the 10 new ones", len(m.Points), m.Job.Step)
	}
}

// TestAccess checks who may read the page.
func TestAccess(t *testing.T) {
	local, _ := open(t, "127.0.0.1:0", "")
	if code, _ := get(t, local.URL(), nil); code != http.StatusOK {
		t.Errorf("loopback: %d", code)
	}
	rebound := func(r *http.Request) { r.Host = "evil.example:80" }
	if code, text := get(t, local.URL()+"api/job", rebound); code != http.StatusForbidden {
		t.Errorf("a foreign name on loopback: %d %s", code, text)
	}
	all, _ := open(t, "0.0.0.0:0", "")
	bare, token, ok := strings.Cut(all.URL(), "?token=")
	if !ok || len(token) < 20 {
		t.Fatalf("the address %s has no token", all.URL())
	}
	bare = strings.Replace(bare, "0.0.0.0", "127.0.0.1", 1)
	bare = strings.Replace(bare, "[::]", "127.0.0.1", 1)
	bearer := func(token string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
	}
	for _, c := range []struct {
		path   string
		change func(*http.Request)
		want   int
	}{
		{"", nil, http.StatusUnauthorized},
		{"api/job", nil, http.StatusUnauthorized},
		{"api/job", bearer("x" + token), http.StatusUnauthorized},
		{"?token=" + token, nil, http.StatusOK},
		{"api/job", bearer(token), http.StatusOK},
		{"api/job", func(r *http.Request) { r.AddCookie(&http.Cookie{Name: all.cookie, Value: token}) }, http.StatusOK},
	} {
		if code, _ := get(t, bare+c.path, c.change); code != c.want {
			t.Errorf("%s: %d, want %d", c.path, code, c.want)
		}
	}
	given, _ := open(t, "127.0.0.1:0", "mine")
	if code, _ := get(t, strings.TrimSuffix(given.URL(), "?token=mine"), nil); code != http.StatusUnauthorized {
		t.Errorf("a given token on loopback: %d without it", code)
	}
	if given.cookie == all.cookie {
		t.Error("two dashboards on one host have the same cookie, so one would replace the other's")
	}
	if _, err := Listen("nonsense", nil, ""); err == nil || !strings.Contains(err.Error(), "want host:port") {
		t.Errorf("error %v", err)
	}
}

// TestConnections checks that open connections are bounded, and that one more closes the oldest.
func TestConnections(t *testing.T) {
	s, _ := open(t, "127.0.0.1:0", "")
	var list []net.Conn
	for range connectionsMax + 1 {
		c, err := net.Dial("tcp", s.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		list = append(list, c)
	}
	if !isClosed(list[0]) {
		t.Error("the oldest connection is not closed")
	}
	if code, _ := get(t, s.URL(), nil); code != http.StatusOK {
		t.Errorf("beside %d connections: %d", connectionsMax, code)
	}
}

// isClosed waits until the server closes a connection.
func isClosed(c net.Conn) bool {
	_ = c.SetReadDeadline(time.Now().Add(requestTimeout / 2))
	_, err := c.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// TestHeader checks that strangers cannot make the process keep much memory for a request.
func TestHeader(t *testing.T) {
	s, _ := open(t, "127.0.0.1:0", "token")
	for size, want := range map[int]int{
		headerBytesMax / 2: http.StatusUnauthorized, 2 * headerBytesMax: http.StatusRequestHeaderFieldsTooLarge,
	} {
		long := func(r *http.Request) { r.Header.Set("X-Long", strings.Repeat("x", size)) }
		if code, text := get(t, "http://"+s.listener.Addr().String()+"/", long); code != want {
			t.Errorf("a header of %d bytes: %d %s, want %d", size, code, text, want)
		}
	}
}

// TestPageSize bounds the page: it loads over slow links.
func TestPageSize(t *testing.T) {
	total := int64(0)
	err := fs.WalkDir(page, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		total += info.Size()
		return err
	})
	if err != nil || total > 200<<10 || total == 0 {
		t.Errorf("the page has %d bytes, %v: want at most 200 KB", total, err)
	}
}
