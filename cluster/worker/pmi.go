package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/pmi"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// storeKey is the key in the launcher's key-value space under which worker 0 puts the address of its store.
const storeKey = "lockstep-store"

// barrierLogged is how long the wait for the other workers lasts before it is logged.
const barrierLogged = 5 * time.Second

// exchangeStore sets the address of the job's store: worker 0 opens its port and publishes the address in the
// launcher's key-value space.
func (w *Worker) exchangeStore(ctx context.Context) (err error) {
	kvs, err := pmi.Open(ctx, w.cfg.Getenv)
	if err != nil {
		return fmt.Errorf("%w; or give the job a store (%s)", err, cluster.EnvStore)
	}
	defer func() {
		if o := w.cfg.Opener; err == nil && (o == nil || o.Name != "mpi") {
			err = kvs.Finalize(ctx)
		} else {
			kvs.Close() // MPI starts and finalizes the protocol again
		}
		if err != nil && w.port != nil {
			w.port.Close()
		}
	}()
	if w.job.Worker == 0 {
		address, err := w.openStorePort(ctx)
		if err != nil {
			return fmt.Errorf("serving the store for the other workers: %w", err)
		}
		if err := kvs.Put(ctx, storeKey, address); err != nil {
			return err
		}
	}
	logged := time.AfterFunc(barrierLogged, func() {
		w.cfg.Logger.Warn("worker: waiting for the other workers at the launcher's barrier (PMI)", "at most",
			w.cfg.RendezvousTimeout)
	})
	defer logged.Stop()
	switch err := kvs.Barrier(ctx); {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("rendezvous timed out after %v: not all of the %d workers have reached the launcher's barrier "+
			"(PMI): %w", w.cfg.RendezvousTimeout, w.job.Workers, err)
	case err != nil:
		return err
	}
	address, err := kvs.Get(ctx, storeKey)
	if err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		return fmt.Errorf("the address of worker 0's store, from the launcher: %w", err)
	}
	job := *w.job
	job.Store = "tcp://" + address
	w.job = &job
	return nil
}

// openStorePort opens the port of the store, at [Config.Listen] and [Config.Ports] if they are given, and returns the
// address by which the other workers reach it.
func (w *Worker) openStorePort(ctx context.Context) (string, error) {
	host, ports := w.cfg.Listen, cmp.Or(w.cfg.Ports, "0")
	advertise := ""
	switch {
	case host == "" && oneHost(w.job):
		host = "127.0.0.1"
	case host == "":
		host = ownAddress(ctx)
	case net.ParseIP(host).IsUnspecified():
		advertise = ownAddress(ctx)
	}
	var err error
	w.port, err = w.openPort(net.JoinHostPort(host, ports))
	if err != nil {
		return "", err
	}
	if advertise == "" {
		return w.port.Addr(), nil
	}
	_, port, err := net.SplitHostPort(w.port.Addr())
	return net.JoinHostPort(advertise, port), err
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
