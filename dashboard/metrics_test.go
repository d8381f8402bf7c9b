package dashboard

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/timeline"
)

// fixed is a source that does not change.
type fixed struct{ job status.Job }

func (f *fixed) Job() status.Job                   { return f.job }
func (f *fixed) Charts(int64, int64) status.Charts { return status.Charts{Series: 1} }

// TestMetrics checks the metrics of a job against Prometheus' rules for names, and their values as Prometheus reads
// them: with its token, from the server of the page and from a separate one.
func TestMetrics(t *testing.T) {
	loss := 0.5
	source := &fixed{status.Job{
		Version: 1, Job: "digits \"1\"", Restarts: 2, Step: 70, ExamplesPerSecond: 100, StepSeconds: 0.25,
		Training: &timeline.Training{
			Epoch: 3, Loss: &loss, Metrics: map[string]float64{"accuracy": 0.75}, Validation: map[string]float64{"loss": 0.625},
		},
		Straggler: &timeline.Straggler{Worker: 1},
		Workers: []status.Worker{
			{Worker: 0, Host: "a", State: "running", Step: 70, Memory: 1 << 20, CPUSeconds: 1.5, Wait: 0.5},
			{Worker: 1, Host: "b", State: "silent", Step: 69, HeartbeatAge: 6},
		},
	}}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(collector{source})
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v: promlint: %+v", err, problems)
	}
	for _, listen := range []func(string, Source, string) (*Server, error){Listen, ListenMetrics} {
		s, err := listen("127.0.0.1:0", source, "token")
		if err != nil {
			t.Fatal(err)
		}
		get := func(token string) (string, int) {
			url := "http://" + s.listener.Addr().String() + "/metrics"
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Authorization", "Bearer "+token)
			answer, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			text, err := io.ReadAll(answer.Body)
			if err != nil {
				t.Fatal(err)
			}
			return string(text), answer.StatusCode
		}
		if _, code := get("other"); code != http.StatusUnauthorized {
			t.Errorf("another token: status %d", code)
		}
		text, code := get("token")
		lines := strings.Split(text, "\n")
		for _, want := range []string{
			`lockstep_training_step{job_name="digits \"1\""} 70`,
			`lockstep_training_loss{job_name="digits \"1\""} 0.5`,
			`lockstep_training_metric{job_name="digits \"1\"",name="accuracy"} 0.75`,
			`lockstep_validation_metric{job_name="digits \"1\"",name="loss"} 0.625`,
			`lockstep_job_restarts_total{job_name="digits \"1\""} 2`,
			`lockstep_worker_up{host="a",job_name="digits \"1\"",worker="0"} 1`,
			`lockstep_worker_up{host="b",job_name="digits \"1\"",worker="1"} 0`,
			`lockstep_worker_straggler{host="b",job_name="digits \"1\"",worker="1"} 1`,
			`lockstep_worker_cpu_seconds_total{host="a",job_name="digits \"1\"",worker="0"} 1.5`,
			`lockstep_worker_step_ratio{host="a",job_name="digits \"1\"",part="wait",worker="0"} 0.5`,
			`# TYPE lockstep_job_restarts_total counter`,
		} {
			if code != http.StatusOK || !slices.Contains(lines, want) {
				t.Errorf("status %d, %s is missing in\n%s", code, want, text)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMetricsOfAnyNames checks that names that are not UTF-8, and a state that is not current, do not end the process
// or hide the other metrics.
func TestMetricsOfAnyNames(t *testing.T) {
	s, err := ListenMetrics("127.0.0.1:0", &fixed{status.Job{
		Job: "job\xff", Step: 70,
		Training: &timeline.Training{Metrics: map[string]float64{"a\xfe": 1, "a\xff": 2, "b\n": 3}},
		Workers:  []status.Worker{{Worker: 0, Host: "h\xff", State: "unknown", Step: 70}},
	}}, "")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	code, text := get(t, s.URL()+"metrics", nil)
	http.DefaultClient.CloseIdleConnections()
	for _, want := range []string{
		"lockstep_training_step{job_name=\"job\ufffd\"} 70",
		"lockstep_training_metric{job_name=\"job\ufffd\",name=\"b\\n\"} 3",
		"lockstep_worker_step{host=\"h\ufffd\",job_name=\"job\ufffd\",worker=\"0\"} 70",
	} {
		if code != http.StatusOK || !slices.Contains(strings.Split(text, "\n"), want) {
			t.Errorf("status %d, %s is missing in\n%s", code, want, text)
		}
	}
	if strings.Contains(text, "\nlockstep_worker_up") {
		t.Errorf("a worker is up or down, though that is unknown:\n%s", text)
	}
}
