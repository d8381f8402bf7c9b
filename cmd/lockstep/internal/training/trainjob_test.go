//go:build unix

package training

import (
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/train/trainjob"
)

// TestTrainJob trains in the environment of a TrainJob, whose controller answers, refuses, or is not there. The status
// is what the controller of Kubeflow's Trainer accepts, and the training goes on in any case.
func TestTrainJob(t *testing.T) {
	dir := t.TempDir()
	token, cert := filepath.Join(dir, "token"), filepath.Join(dir, "ca.crt")
	var mu sync.Mutex
	var bodies []string
	code := http.StatusOK
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // an incomplete one is not decoded below
		mu.Lock()
		defer mu.Unlock()
		if r.Method != http.MethodPost || r.URL.Path != "/status" || r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("%s %s with %v", r.Method, r.URL.Path, r.Header)
		}
		bodies = append(bodies, string(body))
		w.WriteHeader(code)
	}))
	defer server.Close()
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(cert, text, 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(url, cert string) (string, int) {
		cmd := clitest.Process(t, "train", "--model", "mlp", "--global-batch", "64", "--steps", "2",
			"--progress", "none")
		cmd.Env = append(cmd.Environ(), trainjob.EnvURL+"="+url, trainjob.EnvCert+"="+cert, trainjob.EnvToken+"="+token)
		out, err := cmd.CombinedOutput()
		return string(out), clitest.ExitCode(err)
	}
	if out, code := run(server.URL+"/status", cert); code != 0 || strings.Contains(out, "trainjob") {
		t.Fatalf("exit code %d:\n%s", code, out)
	}
	var last struct {
		TrainerStatus struct {
			ProgressPercentage, EstimatedRemainingSeconds *int
			Metrics                                       []struct{ Name, Value string }
			LastUpdatedTime                               string
		}
	}
	if len(bodies) == 0 {
		t.Fatal("no status was posted")
	}
	decoder := json.NewDecoder(strings.NewReader(bodies[len(bodies)-1]))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(&last)
	s := last.TrainerStatus
	if err != nil || s.ProgressPercentage == nil || *s.ProgressPercentage != 100 || s.EstimatedRemainingSeconds == nil ||
		len(s.Metrics) != 2 || s.Metrics[0].Name != "loss" || s.Metrics[1].Name != "accuracy" || s.LastUpdatedTime == "" {
		t.Errorf("%v, the last status is %s", err, bodies[len(bodies)-1])
	}
	mu.Lock()
	code = http.StatusForbidden
	mu.Unlock()
	if out, code := run(server.URL+"/status", cert); code != 0 || strings.Count(out, "answers 403 Forbidden") != 1 {
		t.Errorf("a controller that refuses: exit code %d:\n%s", code, out)
	}
	if out, code := run(server.URL, token); code != 1 || !strings.Contains(out, "holds no certificate in PEM") {
		t.Errorf("no certificate: exit code %d:\n%s", code, out)
	}
}
