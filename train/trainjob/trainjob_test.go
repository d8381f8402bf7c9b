package trainjob

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/train"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestStatus checks a status against the limits of Trainer's v1alpha1.TrainerStatus, in which one number that is too
// large makes the whole status invalid.
func TestStatus(t *testing.T) {
	const steps = 1e9
	r := &reporter{first: -1}
	at := func(step int, after time.Duration) status {
		s := train.Step{EpochBegin: train.EpochBegin{Epochs: 1, Steps: steps}, Step: step}
		mean := train.Result{Loss: math.NaN(), Metrics: map[string]float64{
			"accuracy": 0.5, "infinite": math.Inf(1), strings.Repeat("a", nameMax+1): 1, strings.Repeat("é", nameMax): 1,
		}}
		for i := range metricsMax {
			mean.Metrics[fmt.Sprint("z", i)] = 1
		}
		return r.status(s, mean, time.Unix(1e9, 0).Add(after))
	}
	first := at(1, 0)
	if *first.Percentage != 0 || first.Remaining != nil {
		t.Errorf("first status: %d %%, %v: want no time that remains, which is unknown", *first.Percentage, first.Remaining)
	}
	if s := at(2, 10*time.Minute); *s.Remaining != math.MaxInt32 {
		t.Errorf("%d seconds remain, want the limit", *s.Remaining)
	}
	s := at(steps/2+1, time.Hour)
	if *s.Percentage != 50 || *s.Remaining != 3600 {
		t.Errorf("%d %%, %d seconds remain: want 50 %%, an hour", *s.Percentage, *s.Remaining)
	}
	if len(s.Metrics) != metricsMax || s.Metrics[0] != (metric{"accuracy", "0.5"}) || s.Metrics[1].Name != "z0" {
		t.Errorf("%d metrics, %v, …: want %d", len(s.Metrics), s.Metrics[:2], metricsMax)
	}
	for _, m := range s.Metrics {
		if len([]rune(m.Name)) > nameMax {
			t.Errorf("a name of %d characters", len([]rune(m.Name)))
		}
	}
}

// server answers the requests of a client without a network.
type server func(*http.Request) (int, error)

func (s server) RoundTrip(r *http.Request) (*http.Response, error) {
	code, err := s(r)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: code, Status: fmt.Sprint(code), Body: http.NoBody, Request: r}, nil
}

// TestReports checks which reports arrive at a server that is slow, refuses requests for a moment, or is lost: always
// the last one of a complete training, if the server answers at all, and none holds the training up.
func TestReports(t *testing.T) {
	for name, c := range map[string]struct {
		delay    time.Duration
		answers  []int // of the first requests; then 200. 0: the connection fails
		want     []int
		warnings int
	}{
		"fast":        {0, nil, []int{1, 2, 3, 100}, 0},
		"slow":        {12 * time.Second, nil, []int{1, 3, 100}, 0},
		"interrupted": {0, []int{200, 0, 503, 429, 0}, []int{1, 2, 3, 100, 100, 100}, 1},
		"forbidden":   {0, []int{403, 403, 403, 403, 403}, []int{1, 2, 3, 100}, 1},
		"lost":        {0, make([]int, 9), []int{1, 2, 3, 100, 100, 100}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []int
				requests := server(func(r *http.Request) (int, error) {
					var m map[string]status
					if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
						t.Error(err)
					}
					got = append(got, *m["trainerStatus"].Percentage)
					time.Sleep(c.delay)
					switch n := len(got); {
					case n > len(c.answers):
						return http.StatusOK, nil
					case c.answers[n-1] == 0:
						return 0, errors.New("connection refused")
					default:
						return c.answers[n-1], nil
					}
				})
				var log strings.Builder
				r := &reporter{
					cfg:    Config{URL: "http://trainer/status", Logger: slog.New(slog.NewTextHandler(&log, nil))},
					client: &http.Client{Transport: requests},
				}
				r.begin()
				for i := range 3 {
					begin := time.Now()
					r.send(status{Percentage: new(i + 1)})
					if took := time.Since(begin); took > 0 {
						t.Errorf("report %d took %v of the training", i+1, took)
					}
					time.Sleep(postEvery)
				}
				r.send(status{Percentage: new(100), last: true})
				close(r.posts)
				r.work.Wait()
				if !slices.Equal(got, c.want) {
					t.Errorf("the server got %v, want %v", got, c.want)
				}
				if n := strings.Count(log.String(), "reporting the progress"); n != c.warnings {
					t.Errorf("%d warnings, want %d:\n%s", n, c.warnings, &log)
				}
			})
		})
	}
}
