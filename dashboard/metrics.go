package dashboard

import (
	"crypto/rand"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/lockstep-ml/lockstep/timeline"
)

// ListenMetrics serves a job to Prometheus, at /metrics of an address as [Listen] takes it, with the same rule for
// tokens. The server of Listen has /metrics, too. The caller must close the server.
func ListenMetrics(address string, source Source, token string) (*Server, error) {
	l, err := listenTCP(address)
	if err != nil {
		return nil, err
	}
	if !l.Addr().(*net.TCPAddr).IP.IsLoopback() && token == "" {
		token = rand.Text()
	}
	return serve(l, source, token, func(s *Server) http.Handler {
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", s.metrics())
		return mux
	}), nil
}

// metrics returns the handler of /metrics.
func (s *Server) metrics() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector{s.source})
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: metricsInFlight,
	})
}

// metricsInFlight bounds the requests for metrics that are answered at a time.
const metricsInFlight = 8

// collector makes Prometheus' metrics of the state of a job.
type collector struct{ source Source }

// The metrics.
var (
	// Prometheus itself adds the labels job and instance, and would rename those of a target.
	jobLabels, workerLabels = []string{"job_name"}, []string{"job_name", "worker", "host"}

	descStep     = describe("training_step", "Last step of the training.", jobLabels)
	descEpoch    = describe("training_epoch", "Epoch of the training, from 1.", jobLabels)
	descLoss     = describe("training_loss", "Mean loss of the epoch so far.", jobLabels)
	descMetric   = describe("training_metric", "Mean of a metric of the epoch so far.", append(jobLabels, "name"))
	descVal      = describe("validation_metric", "Loss and metrics of the latest validation.", append(jobLabels, "name"))
	descRate     = describe("training_examples_per_second", "Examples per second of all replicas.", jobLabels)
	descSeconds  = describe("training_step_duration_seconds", "Mean time of the last steps.", jobLabels)
	descRestarts = describe("job_restarts_total", "Restarts of all workers.", jobLabels)
	descWorkers  = describe("job_workers", "Workers of the job.", jobLabels)

	descUp        = describe("worker_up", "1 if the worker sends heartbeats, else 0. Absent if unknown.", workerLabels)
	descWorker    = describe("worker_step", "Last step of the worker.", workerLabels)
	descAge       = describe("worker_heartbeat_age_seconds", "Time since the last heartbeat of the worker.", workerLabels)
	descMemory    = describe("worker_resident_memory_bytes", "Resident memory of the worker.", workerLabels)
	descCPU       = describe("worker_cpu_seconds_total", "Processor time of the worker.", workerLabels)
	descOwn       = describe("worker_own_work_seconds", "Time in a step without waiting for others.", workerLabels)
	descShare     = describe("worker_step_ratio", "Part of the time of the last steps.", append(workerLabels, "part"))
	descStraggler = describe("worker_straggler", "1 if the worker or its link is slow, else 0.", workerLabels)
)

func describe(name, help string, labels []string) *prometheus.Desc {
	return prometheus.NewDesc("lockstep_"+name, help, slices.Clone(labels), nil)
}

// Describe does not list the metrics, which depend on the job.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends the metrics of the job now.
func (c collector) Collect(out chan<- prometheus.Metric) {
	j := c.source.Job()
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		labels = append([]string{j.Job}, labels...)
		for i := range labels { // names of hosts, jobs and metrics can hold any bytes
			labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
		}
		m, err := prometheus.NewConstMetric(d, kind, value, labels...)
		if err != nil {
			m = prometheus.NewInvalidMetric(d, err)
		}
		out <- m
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		send(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(descStep, float64(j.Step))
	gauge(descRate, j.ExamplesPerSecond)
	gauge(descSeconds, j.StepSeconds)
	gauge(descWorkers, float64(len(j.Workers)))
	send(descRestarts, prometheus.CounterValue, float64(j.Restarts))
	if j.Training != nil {
		c.training(j.Training, gauge)
	}
	truth := func(is bool) float64 {
		if is {
			return 1
		}
		return 0
	}
	for i := range j.Workers {
		w := &j.Workers[i]
		worker := []string{strconv.Itoa(w.Worker), w.Host}
		if w.State != "unknown" { // the store cannot be reached: no worker is known to be down
			gauge(descUp, truth(w.State == "running"), worker...)
		}
		gauge(descWorker, float64(w.Step), worker...)
		gauge(descAge, w.HeartbeatAge, worker...)
		gauge(descOwn, w.OwnSeconds, worker...)
		gauge(descStraggler, truth(j.Straggler.Concerns(w.Worker)), worker...)
		if w.Memory > 0 {
			gauge(descMemory, float64(w.Memory), worker...)
		}
		if w.CPUSeconds > 0 {
			send(descCPU, prometheus.CounterValue, w.CPUSeconds, worker...)
		}
		for part, share := range map[string]float64{
			"input": w.Input, "compute": w.Compute, "wait": w.Wait, "update": w.Update, "other": w.Other,
		} {
			gauge(descShare, share, append(worker, part)...)
		}
	}
}

func (collector) training(t *timeline.Training, gauge func(d *prometheus.Desc, value float64, labels ...string)) {
	gauge(descEpoch, float64(t.Epoch))
	if t.Loss != nil {
		gauge(descLoss, *t.Loss)
	}
	for _, name := range slices.Sorted(maps.Keys(t.Metrics)) {
		gauge(descMetric, t.Metrics[name], name)
	}
	for _, name := range slices.Sorted(maps.Keys(t.Validation)) {
		gauge(descVal, t.Validation[name], name)
	}
}
