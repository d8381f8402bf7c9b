// Package trainjob reports the progress of a training to Kubeflow's Trainer, which shows it in the status of the
// TrainJob: 'kubectl get trainjob NAME -o jsonpath={.status.trainerStatus}'. Trainer offers this from version 2.2.0 on,
// if its feature gate TrainJobStatus is on; it then sets three environment variables in the pods of the job (KEP-2779).
package trainjob

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/lockstep-ml/lockstep/train"
)

// The environment variables of Kubeflow's Trainer.
const (
	EnvURL   = "KUBEFLOW_TRAINER_SERVER_URL"     // where the status is posted
	EnvCert  = "KUBEFLOW_TRAINER_SERVER_CA_CERT" // file with the certificate of the server's authority
	EnvToken = "KUBEFLOW_TRAINER_SERVER_TOKEN"   // file with a token, which is replaced from time to time
)

const (
	postEvery   = 5 * time.Second // Trainer's recommendation: it limits its requests to the Kubernetes API
	postTimeout = 5 * time.Second
	responseMax = 64 << 10 // bytes that are read

	lastTries = 3           // of the last report of a complete training, which no other replaces
	lastPause = time.Second // between them
)

// Trainer refuses a status that exceeds these limits (v1alpha1.TrainerStatus).
const (
	metricsMax = 256
	nameMax    = 64            // characters
	secondsMax = math.MaxInt32 // 68 years
)

// Config configures [New].
type Config struct {
	// URL, CertFile and TokenFile are the values of the environment variables. Without a CertFile, the
	// authorities of the system are trusted.
	URL, CertFile, TokenFile string
	// Steps is FitConfig.Steps.
	Steps int
	// Logger gets the first failure of a report. Default slog.Default().
	Logger *slog.Logger
}

// FromEnvironment returns the configuration by the environment; ok is false if Trainer does not offer the service.
func FromEnvironment(lookup func(string) (string, bool)) (cfg Config, ok bool) {
	cfg.URL, ok = lookup(EnvURL)
	cfg.CertFile, _ = lookup(EnvCert)
	cfg.TokenFile, _ = lookup(EnvToken)
	return cfg, ok && cfg.URL != ""
}

// New returns a callback of the chief that reports the progress of a Fit: percentage, estimated time that remains,
// loss, metrics and those of the validation, at most every 5 seconds and at the end. Numbers that are not finite, and
// metrics with names of more than 64 characters, which Trainer refuses, are left out. It does not wait for a response
// in a step, and no failure of a report ends the training. At the end it waits for a response, for at most 10 seconds.
// The last report of a complete training is tried three times, which can take 22 seconds. It returns an error for an
// invalid configuration.
func New(t *train.Trainer, cfg Config) (train.Callback, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	client := &http.Client{Timeout: postTimeout, Transport: transport}
	if cfg.CertFile != "" {
		text, err := os.ReadFile(cfg.CertFile)
		if err != nil {
			return train.Callback{}, fmt.Errorf("trainjob: the certificate of Kubeflow's Trainer (%s): %w", EnvCert, err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(text) {
			return train.Callback{}, fmt.Errorf("trainjob: %s (%s) holds no certificate in PEM", cfg.CertFile, EnvCert)
		}
		transport.Proxy = nil // the server is in the cluster
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	r := &reporter{t: t, cfg: cfg, client: client}
	return train.Callback{
		OnTrainBegin: func(context.Context) error { r.begin(); return nil },
		OnStepEnd:    func(_ context.Context, s train.Step) error { r.step(s); return nil },
		OnEpochEnd:   func(_ context.Context, e train.Epoch) error { r.validation = e.Validation; return nil },
		OnTrainEnd: func(_ context.Context, h *train.History, err error) {
			r.end(err == nil && !h.Stopped)
		},
	}, nil
}

// reporter reports one Fit.
type reporter struct {
	t      *train.Trainer
	cfg    Config
	client *http.Client

	began      time.Time // when the first report was made
	first      float64   // progress then, from 0 to 1: a resumed training has some; -1: not yet
	sent       time.Time // when the last report was made
	last       train.Step
	taken      bool // a step
	validation *train.Result

	posts  chan status // the latest one to send; has room for it
	work   sync.WaitGroup
	warned bool // used by the goroutine that sends
}

// status is Trainer's TrainerStatus.
type status struct {
	Percentage *int     `json:"progressPercentage,omitempty"`
	Remaining  *int     `json:"estimatedRemainingSeconds,omitempty"`
	Metrics    []metric `json:"metrics,omitempty"`
	Updated    string   `json:"lastUpdatedTime"` // RFC 3339

	last bool // of a complete training
}

type metric struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func (r *reporter) begin() {
	r.first, r.sent, r.taken, r.validation = -1, time.Time{}, false, nil
	posts := make(chan status, 1)
	r.posts = posts
	r.work.Go(func() {
		for s := range posts {
			r.post(s)
		}
	})
}

func (r *reporter) step(s train.Step) {
	r.last, r.taken = s, true
	if s.Validation != nil {
		r.validation = s.Validation
	}
	now := time.Now()
	if now.Sub(r.sent) < postEvery {
		return
	}
	r.sent = now
	r.send(r.status(s, s.Mean(), now))
}

// status describes the training after a step, by the mean of its epoch.
func (r *reporter) status(s train.Step, mean train.Result, now time.Time) status {
	out := status{Updated: now.UTC().Format(time.RFC3339)}
	if done, ok := r.progress(s); ok {
		if r.first < 0 {
			r.first, r.began = done, now
		}
		percentage := int(100 * done)
		out.Percentage = &percentage
		if done > r.first {
			left := math.Ceil(now.Sub(r.began).Seconds() * (1 - done) / (done - r.first))
			out.Remaining = new(int(min(left, secondsMax)))
		}
	}
	add := func(prefix string, result train.Result) {
		put := func(name string, x float64) {
			fits := len(out.Metrics) < metricsMax && utf8.RuneCountInString(prefix+name) <= nameMax
			if fits && !math.IsNaN(x) && !math.IsInf(x, 0) {
				out.Metrics = append(out.Metrics, metric{prefix + name, strconv.FormatFloat(x, 'g', 6, 64)})
			}
		}
		put("loss", result.Loss)
		for _, name := range slices.Sorted(maps.Keys(result.Metrics)) {
			put(name, result.Metrics[name])
		}
	}
	add("", mean)
	if r.validation != nil {
		add("val_", *r.validation)
	}
	return out
}

// progress returns the part of the training that is done, from 0 to 1; ok is false if it is unknown.
func (r *reporter) progress(s train.Step) (done float64, ok bool) {
	if r.cfg.Steps > 0 {
		done, ok = float64(r.t.Steps())/float64(r.cfg.Steps), true
	}
	if s.Steps > 0 && s.Epochs > 0 {
		done, ok = max(done, (float64(s.Epoch)+float64(s.Step)/float64(s.Steps))/float64(s.Epochs)), true
	}
	return min(done, 1), ok
}

// send replaces what has not been sent yet. It does not block: only one goroutine calls it.
func (r *reporter) send(s status) {
	select {
	case <-r.posts:
	default:
	}
	r.posts <- s
}

// end sends the last state, and waits until it is sent.
func (r *reporter) end(succeeded bool) {
	if r.posts == nil {
		return
	}
	if r.taken {
		s := r.status(r.last, r.last.Mean(), time.Now())
		if succeeded {
			s.Percentage, s.Remaining, s.last = new(100), new(0), true
		}
		r.send(s)
	}
	close(r.posts)
	r.work.Wait()
	r.client.CloseIdleConnections()
	r.posts = nil
}

// post sends a status. One that cannot be sent is dropped, since another follows; the last one is tried again.
func (r *reporter) post(s status) {
	again, err := r.try(s)
	for n := 1; again && s.last && n < lastTries; n++ {
		time.Sleep(lastPause)
		again, err = r.try(s)
	}
	if err != nil && !r.warned {
		r.warned = true
		r.cfg.Logger.Warn("trainjob: reporting the progress to Kubeflow's Trainer; this does not affect the training",
			"err", err)
	}
}

// try sends a status once. again reports whether the error may be gone the next time.
func (r *reporter) try(s status) (again bool, err error) {
	text, err := json.Marshal(map[string]status{"trainerStatus": s})
	if err != nil {
		return false, err
	}
	request, err := http.NewRequest(http.MethodPost, r.cfg.URL, bytes.NewReader(text))
	if err != nil {
		return false, err
	}
	request.Header.Set("Content-Type", "application/json")
	if r.cfg.TokenFile != "" {
		token, err := os.ReadFile(r.cfg.TokenFile)
		if err != nil {
			return false, fmt.Errorf("the token (%s): %w", EnvToken, err)
		}
		request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	response, err := r.client.Do(request)
	if err != nil {
		return true, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, responseMax))
	if code := response.StatusCode; code != http.StatusOK {
		text := bytes.TrimSpace(body[:min(len(body), 1000)])
		err = errors.Join(fmt.Errorf("%s answers %s: %s", r.cfg.URL, response.Status, text), err)
		return code >= 500 || code == http.StatusTooManyRequests, err
	}
	return err != nil, err
}
