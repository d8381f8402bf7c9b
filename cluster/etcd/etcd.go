// Package etcd is a rendezvous store in etcd, for clusters that have one: the workers of a job join there, and none of
// them has to serve a store. [rendezvous.Open] accesses etcd by its JSON gateway; this package uses etcd's own client,
// for an etcd whose gateway is disabled, with the same content. It is a separate module, because that client is many
// times larger than Lockstep.
//
//	cfg := rendezvous.Config{Schemes: map[string]rendezvous.Opener{"etcd": etcd.Opener(etcd.Config{})}}
//	store, err := rendezvous.Open(ctx, "etcd://10.0.0.1:2379,10.0.0.2:2379/lockstep", cfg)
//
// Keys lie below the URL's path. A value of more than 1 MiB is stored in parts, as etcd refuses larger requests by
// default. etcd keeps its content: when a job has ended, rendezvous.DeleteJob deletes the job's keys.
package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// Config configures the access to etcd. The zero value works with a cluster without encryption and users.
type Config struct {
	// TLS is for etcd's own certificates, which are unrelated to the job's. Default nil: plain TCP.
	TLS *tls.Config
	// Username and Password identify a user of etcd.
	Username, Password string
}

// FromEnvironment returns the configuration that etcdctl would read from the environment: ETCDCTL_CACERT,
// ETCDCTL_CERT and ETCDCTL_KEY, which name files, ETCDCTL_USER ("name:password" or "name") and
// ETCDCTL_PASSWORD.
func FromEnvironment(getenv func(string) string, readFile func(string) ([]byte, error)) (Config, error) {
	var cfg Config
	cfg.Username, cfg.Password, _ = strings.Cut(getenv("ETCDCTL_USER"), ":")
	if p := getenv("ETCDCTL_PASSWORD"); p != "" {
		cfg.Password = p
	}
	authority, cert, key := getenv("ETCDCTL_CACERT"), getenv("ETCDCTL_CERT"), getenv("ETCDCTL_KEY")
	if authority == "" && cert == "" && key == "" {
		return cfg, nil
	}
	cfg.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	if authority != "" {
		pem, err := readFile(authority)
		if err != nil {
			return cfg, fmt.Errorf("etcd: ETCDCTL_CACERT: %w", err)
		}
		cfg.TLS.RootCAs = x509.NewCertPool()
		if !cfg.TLS.RootCAs.AppendCertsFromPEM(pem) {
			return cfg, fmt.Errorf("etcd: ETCDCTL_CACERT: %s holds no certificate", authority)
		}
	}
	if (cert == "") != (key == "") {
		return cfg, errors.New("etcd: ETCDCTL_CERT and ETCDCTL_KEY: want both or none")
	}
	if cert == "" {
		return cfg, nil
	}
	certPEM, err := readFile(cert)
	if err != nil {
		return cfg, fmt.Errorf("etcd: ETCDCTL_CERT: %w", err)
	}
	keyPEM, err := readFile(key)
	if err != nil {
		return cfg, fmt.Errorf("etcd: ETCDCTL_KEY: %w", err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return cfg, fmt.Errorf("etcd: ETCDCTL_CERT and ETCDCTL_KEY: %w", err)
	}
	cfg.TLS.Certificates = []tls.Certificate{pair}
	return cfg, nil
}

// Opener returns an opener for "etcd://host:port,host:port/prefix" and "etcds://…". The latter is encrypted,
// the former with cfg.TLS only. It waits until ctx ends for a cluster that does not answer yet.
func Opener(cfg Config) rendezvous.Opener {
	return func(ctx context.Context, url string, _ rendezvous.Config) (rendezvous.Store, error) {
		scheme, rest, _ := strings.Cut(url, "://")
		hosts, prefix, _ := strings.Cut(rest, "/")
		if hosts == "" {
			return nil, errors.New("want etcd://host:port,host:port/prefix")
		}
		encryption := cfg.TLS
		if encryption == nil && scheme == "etcds" {
			encryption = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		client, err := clientv3.New(clientv3.Config{
			Endpoints: strings.Split(hosts, ","), TLS: encryption, Username: cfg.Username, Password: cfg.Password,
			DialTimeout: dialWithin, DialKeepAliveTime: aliveEvery, DialKeepAliveTimeout: aliveEvery,
			Context: context.WithoutCancel(ctx), Logger: zap.NewNop(),
		})
		if err != nil {
			return nil, err
		}
		s := &store{client: client, prefix: strings.TrimSuffix(prefix, "/") + "/", done: make(chan struct{})}
		if err := s.await(ctx); err != nil {
			return nil, errors.Join(err, client.Close())
		}
		return s, nil
	}
}

const (
	dialWithin = 5 * time.Second
	aliveEvery = 5 * time.Second
)

// store is a handle on an etcd cluster.
type store struct {
	client *clientv3.Client
	prefix string // of all keys
	done   chan struct{}
	once   sync.Once
}

// await waits until etcd answers a request.
func (s *store) await(ctx context.Context) error {
	for {
		short, cancel := context.WithTimeout(ctx, dialWithin)
		_, err := s.client.Get(short, s.prefix+"?", clientv3.WithCountOnly())
		cancel()
		if err == nil || !temporary(err) {
			return err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%w (the last attempt: %w)", context.Cause(ctx), err)
		}
	}
}

// temporary reports whether etcd may answer later.
func temporary(err error) bool {
	c := status.Code(err)
	var e rpctypes.EtcdError
	if errors.As(err, &e) {
		c = e.Code()
	}
	return c == codes.Unavailable || c == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded)
}

// call calls do with a context that also ends with Close, and adds the cause of the end to the error.
func (s *store) call(ctx context.Context, wrong error, do func(ctx context.Context) error) error {
	if wrong != nil {
		return wrong
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-s.done:
			cancel(rendezvous.ErrClosed)
		case <-stop:
		}
	})
	defer watch.Wait()
	defer close(stop)
	select {
	case <-s.done:
		return rendezvous.ErrClosed
	default:
	}
	err := do(ctx)
	select {
	case <-s.done: // a call ended by Close may return before ctx ends
		if err != nil {
			return rendezvous.ErrClosed
		}
	default:
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, rpctypes.ErrCompacted):
		return rendezvous.ErrCompacted
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%w: %w", rendezvous.ErrFull, err)
	}
	return err
}

// Close implements [rendezvous.Store].
func (s *store) Close() (err error) {
	s.once.Do(func() {
		close(s.done)
		if err = s.client.Close(); errors.Is(err, context.Canceled) {
			err = nil // its own context's
		}
	})
	return err
}

// checkPair returns an error for an invalid key or value.
func checkPair(key string, value []byte) error {
	if err := rendezvous.CheckKey(key); err != nil {
		return err
	}
	return rendezvous.CheckValue(key, value)
}
