package dashboard

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// ListenMetrics serves a job to Prometheus, at /metrics of an address as [Listen] takes it, with the same rule for
// tokens. The server of Listen has /metrics, too. The caller must close the server.
func ListenMetrics(address string, source Source, token string) (*Server, error) {
	return listen(address, source, token, func(s *Server) http.Handler {
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", s.metrics())
		return mux
	})
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

// Describe does not list the metrics, which depend on the job.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends the metrics of the job now. Each has the job's name as a label: Prometheus itself adds the labels job
// and instance, and would rename those of a target.
func (c collector) Collect(out chan<- prometheus.Metric) {
	j := c.source.Job()
	send := func(kind prometheus.ValueType, name, help string, value float64, labels ...string) {
		names, values := []string{"job_name"}, []string{j.Job}
		for pair := range slices.Chunk(labels, 2) {
			names, values = append(names, pair[0]), append(values, pair[1])
		}
		for i := range values { // names of hosts, jobs and metrics can hold any bytes
			values[i] = strings.ToValidUTF8(values[i], "\uFFFD")
		}
		d := prometheus.NewDesc("lockstep_"+name, help, names, nil)
		m, err := prometheus.NewConstMetric(d, kind, value, values...)
		if err != nil {
			m = prometheus.NewInvalidMetric(d, err)
		}
		out <- m
	}
	gauge := func(name, help string, value float64, labels ...string) {
		send(prometheus.GaugeValue, name, help, value, labels...)
	}
	gauge("training_step", "Last step of the training.", float64(j.Step))
	gauge("training_examples_per_second", "Examples per second of all replicas.", j.ExamplesPerSecond)
	gauge("training_step_duration_seconds", "Mean time of the last steps.", j.StepSeconds)
	gauge("job_workers", "Workers of the job.", float64(len(j.Workers)))
	send(prometheus.CounterValue, "job_restarts_total", "Restarts of all workers.", float64(j.Restarts))
	if t := j.Training; t != nil {
		gauge("training_epoch", "Epoch of the training, from 1.", float64(t.Epoch))
		if t.Loss != nil {
			gauge("training_loss", "Mean loss of the epoch so far.", *t.Loss)
		}
		for name, x := range t.Metrics {
			gauge("training_metric", "Mean of a metric of the epoch so far.", x, "name", name)
		}
		for name, x := range t.Validation {
			gauge("validation_metric", "Loss and metrics of the latest validation.", x, "name", name)
		}
	}
	truth := map[bool]float64{true: 1}
	for i := range j.Workers {
		w := &j.Workers[i]
		worker := []string{"worker", strconv.Itoa(w.Worker), "host", w.Host}
		if w.State != "unknown" { // the store cannot be reached: no worker is known to be down
			gauge("worker_up", "1 if the worker sends heartbeats, else 0. Absent if unknown.", truth[w.State == "running"],
				worker...)
		}
		gauge("worker_step", "Last step of the worker.", float64(w.Step), worker...)
		gauge("worker_heartbeat_age_seconds", "Time since the last heartbeat of the worker.", w.HeartbeatAge, worker...)
		gauge("worker_own_work_seconds", "Time in a step without waiting for others.", w.OwnSeconds, worker...)
		gauge("worker_straggler", "1 if the worker or its link is slow, else 0.", truth[j.Straggler.Concerns(w.Worker)],
			worker...)
		if w.Memory > 0 {
			gauge("worker_resident_memory_bytes", "Resident memory of the worker.", float64(w.Memory), worker...)
		}
		if w.CPUSeconds > 0 {
			send(prometheus.CounterValue, "worker_cpu_seconds_total", "Processor time of the worker.", w.CPUSeconds, worker...)
		}
		for part, share := range map[string]float64{
			"input": w.Input, "compute": w.Compute, "wait": w.Wait, "update": w.Update, "other": w.Other,
		} {
			gauge("worker_step_ratio", "Part of the time of the last steps.", share, append(worker, "part", part)...)
		}
	}
}
