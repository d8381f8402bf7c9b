package dashboard

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/timeline"
)

// TestProcess: one call serves what the recorder of this process has, also steps that are made later.
func TestProcess(t *testing.T) {
	recorder := timeline.NewRecorder()
	s, err := ListenProcess("127.0.0.1:0", recorder)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	}()
	trainer := recorder.NewTrainer()
	for step := int64(1); step <= 3; step++ {
		span := 20 * time.Millisecond
		at := time.Duration(step) * span
		recorder.AddStep(timeline.Step{Trainer: trainer, Step: step, Start: at - span, End: at, Loss: 0.5, Examples: 8})
		var m Message
		if code, text := get(t, s.URL()+"api/job", nil); code != http.StatusOK || json.Unmarshal([]byte(text), &m) != nil {
			t.Fatalf("%d: %s", code, text)
		}
		if m.Job.Step != step || len(m.Job.Workers) != 1 || m.Job.Workers[0].PID != os.Getpid() {
			t.Errorf("step %d: %+v", step, m.Job)
		}
		if want := filepath.Base(os.Args[0]); m.Job.Job != want {
			t.Errorf("job %q, want %q", m.Job.Job, want)
		}
	}
	if _, err := ListenProcess("nowhere", recorder); err == nil {
		t.Error("an address without a port is accepted")
	}
}
