package worker

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/pmi"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/listener"
)

// storeKey is the key in the launcher's key-value space under which worker 0 puts the address of its store.
const storeKey = "lockstep-store"

// exchangeStore sets the address of the job's store: worker 0 opens its port and passes the address on by the launcher.
func (w *Worker) exchangeStore(ctx context.Context) (err error) {
	kvs, err := pmi.Open(w.cfg.Getenv)
	if err != nil {
		return fmt.Errorf("%w; or give the job a store (%s)", err, cluster.EnvStore)
	}
	defer kvs.Bind(ctx)()
	defer func() {
		if o := w.cfg.Opener; err == nil && (o == nil || o.Name != "mpi") {
			err = kvs.Finalize()
		} else {
			kvs.Close() // MPI starts and finalizes the protocol again
		}
		if err != nil && w.port != nil {
			w.port.Close()
		}
	}()
	if w.job.Worker == 0 {
		address := net.JoinHostPort(ownAddress(ctx), "0")
		if w.port, err = listener.Open(listener.Config{Listen: address, Logger: w.cfg.Logger}); err != nil {
			return fmt.Errorf("serving the store for the other workers: %w", err)
		}
		if err := kvs.Put(storeKey, w.port.Addr()); err != nil {
			return err
		}
	}
	if err := kvs.Barrier(); err != nil {
		return err
	}
	address, err := kvs.Get(storeKey)
	if err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		return fmt.Errorf("worker: the address of worker 0's store, passed on by the launcher: %w", err)
	}
	job := *w.job
	job.Store = "tcp://" + address
	w.job = &job
	return nil
}

// ownAddress returns the address by which other hosts reach this one, or loopback if it has none.
func ownAddress(ctx context.Context) string {
	if host, err := os.Hostname(); err == nil {
		if ip, err := rendezvous.RouteTo(ctx, net.JoinHostPort(host, "9")); err == nil && !ip.IsLoopback() {
			return ip.String()
		}
	}
	if ip, err := rendezvous.RouteTo(ctx, "192.0.2.1:9"); err == nil { // RFC 5737: by the default route
		return ip.String()
	}
	return "127.0.0.1"
}
