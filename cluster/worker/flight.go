package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/collective/flight"
)

// The last calls of all workers' replicas (see package flight) explain a failure together. So the first
// worker that fails, or that receives a request for them, sends the request to all. Each worker writes its
// records from a separate goroutine, even if its training goroutine is stuck.

// Flights returns the flight records of this worker's replicas: their last calls.
func (w *Worker) Flights() *flight.File {
	f := &flight.File{Header: flight.Header{Job: w.job.ID, Epoch: w.job.Epoch, Worker: w.job.Worker, At: time.Now()}}
	for _, m := range w.members {
		f.Members = append(f.Members, flight.Member{
			Worker: m.Worker, Host: m.Host, PID: m.PID, First: m.First,
			Replicas: m.Replicas,
		})
	}
	f.Ranks = w.flights()
	return f
}

// recordsFolder returns the folder for the records of a job of several workers, or "".
func (w *Worker) recordsFolder() string {
	folder, _ := w.cfg.Getenv(cluster.EnvRecords)
	if w.job.Workers == 1 {
		return "" // the errors of one process contain everything
	}
	return folder
}

// writeFlights writes this worker's records, if there is a folder for them.
func (w *Worker) writeFlights(why string) error {
	folder := w.recordsFolder()
	if folder == "" {
		return nil
	}
	f := w.Flights()
	if len(f.Ranks) == 0 {
		return nil
	}
	f.Why = why
	return flight.Write(folder, f)
}

// requestFlights requests the records of all workers.
func (w *Worker) requestFlights(ctx context.Context, why string) error {
	if w.recordsFolder() == "" {
		return nil
	}
	return w.store.Set(ctx, w.key("flight"), []byte(why))
}

// serveFlightRequests writes the records at every request, until the worker leaves.
func (w *Worker) serveFlightRequests(ctx context.Context) error {
	ask := w.key("flight")
	_, after, err := w.store.List(ctx, ask)
	if err != nil {
		return err
	}
	return rendezvous.Watch(ctx, w.store, ask, &after, func(changes []rendezvous.Entry) error {
		for _, entry := range changes {
			if e := w.writeFlights(string(entry.Value)); e != nil {
				w.cfg.Logger.Warn("worker: writing the records of the last calls failed", "error", e)
			}
		}
		return nil
	})
}

// serveSignal makes all workers write their records when this one receives the signal for it.
func (w *Worker) serveSignal(ctx context.Context, signals <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-signals:
		}
		why := fmt.Sprintf("worker %d received a request for the records", w.job.Worker)
		short, cancel := context.WithTimeout(ctx, storeWait)
		err := errors.Join(w.writeFlights(why), w.requestFlights(short, why))
		cancel()
		w.cfg.Logger.Info("worker: requested the records of the last calls from all workers", "folder", w.recordsFolder(),
			"error", err)
	}
}
