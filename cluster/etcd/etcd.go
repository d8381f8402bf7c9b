// Package etcd is a rendezvous store in etcd, for clusters that have one: the workers of a job join there, and none of
// them has to serve a store. It uses etcd's official client. Packages cluster/worker and cluster/launch open such
// stores by their URLs; a program that calls [rendezvous.Open] itself passes [Schemes]:
//
//	cfg := rendezvous.Config{Schemes: etcd.Schemes()}
//	store, err := rendezvous.Open(ctx, "etcd://10.0.0.1:2379,10.0.0.2:2379/lockstep", cfg)
//
// Keys lie below the URL's path. A value of more than 1 MiB is stored in parts, as etcd refuses larger requests by
// default. etcd keeps its content: when a job has ended, [rendezvous.DeleteJob] deletes the job's keys.
package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/pause"
	"github.com/lockstep-ml/lockstep/internal/redact"
)

// Config configures the access to etcd, besides its addresses. The zero value works with a cluster without encryption
// and users.
type Config struct {
	// TLS is for etcd's own certificates, which are unrelated to the job's. Only etcds:// is encrypted. Default nil: the
	// system's certificate authorities.
	TLS *tls.Config
	// Username and Password identify a user of etcd.
	Username, Password string
}

// Schemes returns the openers of etcd:// and etcds:// for [rendezvous.Config], with the configuration of
// [FromEnvironment] at the time of the call of [rendezvous.Open].
func Schemes() map[string]rendezvous.Opener {
	open := func(ctx context.Context, url string, cfg rendezvous.Config) (rendezvous.Store, error) {
		login, err := FromEnvironment(os.Getenv, cluster.ReadFile)
		if err != nil {
			return nil, err
		}
		return Opener(login)(ctx, url, cfg)
	}
	return map[string]rendezvous.Opener{"etcd": open, "etcds": open}
}

// FromEnvironment returns the configuration that etcdctl would read from the environment: ETCDCTL_CACERT,
// ETCDCTL_CERT and ETCDCTL_KEY, which name files, ETCDCTL_USER ("name:password" or "name") and
// ETCDCTL_PASSWORD.
func FromEnvironment(getenv func(string) string, readFile func(string) ([]byte, error)) (Config, error) {
	cfg := Config{TLS: &tls.Config{MinVersion: tls.VersionTLS12}}
	cfg.Username, cfg.Password, _ = strings.Cut(getenv("ETCDCTL_USER"), ":")
	if p := getenv("ETCDCTL_PASSWORD"); p != "" {
		cfg.Password = p
	}
	if name := getenv("ETCDCTL_CACERT"); name != "" {
		text, err := readFile(name)
		if err != nil {
			return cfg, fmt.Errorf("ETCDCTL_CACERT: %w", err)
		}
		cfg.TLS.RootCAs = x509.NewCertPool()
		if !cfg.TLS.RootCAs.AppendCertsFromPEM(text) {
			return cfg, fmt.Errorf("ETCDCTL_CACERT: %s holds no certificate", name)
		}
	}
	cert, key := getenv("ETCDCTL_CERT"), getenv("ETCDCTL_KEY")
	if cert == "" && key == "" {
		return cfg, nil
	}
	certText, err1 := readFile(cert)
	keyText, err2 := readFile(key)
	if err := errors.Join(err1, err2); err != nil {
		return cfg, fmt.Errorf("ETCDCTL_CERT and ETCDCTL_KEY: %w", err)
	}
	pair, err := tls.X509KeyPair(certText, keyText)
	if err != nil {
		return cfg, fmt.Errorf("ETCDCTL_CERT and ETCDCTL_KEY: %w", err)
	}
	cfg.TLS.Certificates = []tls.Certificate{pair}
	return cfg, nil
}

const (
	dialTimeout    = 5 * time.Second        // for an endpoint to be reached
	callTimeout    = 5 * time.Second        // for a call, at least
	keepalive      = 5 * time.Second        // without data until an endpoint is probed, and for its answer
	retryPause     = 100 * time.Millisecond // before all endpoints are tried again
	reconnectPause = time.Second            // at most, before an endpoint is dialed again
	tokenAttempts  = 3                      // of a call inside etcd's client, which fetches a new token in between
)

// Opener returns an opener for "etcd://host:port,host:port/prefix", and for "etcds://…", which is encrypted. It waits
// until ctx ends for a cluster that does not answer yet. Of [rendezvous.Config] it uses Dial and ReconnectTimeout.
func Opener(login Config) rendezvous.Opener {
	return func(ctx context.Context, url string, cfg rendezvous.Config) (rendezvous.Store, error) {
		scheme, rest, _ := strings.Cut(url, "://")
		hosts, prefix, _ := strings.Cut(rest, "/")
		c := clientv3.Config{
			Username: login.Username, Password: login.Password, Logger: zap.NewNop(), MaxUnaryRetries: tokenAttempts,
			DialTimeout: dialTimeout, DialKeepAliveTime: keepalive, DialKeepAliveTimeout: keepalive,
			DialOptions: []grpc.DialOption{
				grpc.WithStatsHandler(sendTracker{}),
				grpc.WithChainUnaryInterceptor(failFast),
				grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
					return cfg.Dial(ctx, "tcp", address)
				}),
				grpc.WithConnectParams(grpc.ConnectParams{
					Backoff:           backoff.Config{BaseDelay: retryPause, Multiplier: 1.6, Jitter: 0.2, MaxDelay: reconnectPause},
					MinConnectTimeout: dialTimeout,
				}),
			},
		}
		web := "http://"
		if scheme == "etcds" {
			if web, c.TLS = "https://", login.TLS; c.TLS == nil {
				c.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
			}
		}
		if strings.Contains(hosts, "@") {
			return nil, fmt.Errorf("etcd at %s: %w", redact.URL(url), errUser)
		}
		for host := range strings.SplitSeq(hosts, ",") {
			if !isAddress(host) {
				if strings.Contains(rest, "@") { // a password with a slash
					return nil, fmt.Errorf("etcd at %s: %w", redact.URL(url), errUser)
				}
				return nil, fmt.Errorf("etcd at %q: want host:port, or several with commas between", hosts)
			}
			c.Endpoints = append(c.Endpoints, web+host)
		}
		return connect(ctx, c, &store{
			hosts: hosts, prefix: strings.TrimSuffix(prefix, "/") + "/", timeout: cfg.ReconnectTimeout,
		})
	}
}

// isAddress reports whether a text is host:port. The port must be a number: for the name of a
// service, etcd's client would wait forever.
func isAddress(text string) bool {
	host, port, err := net.SplitHostPort(text)
	n, wrong := strconv.ParseUint(port, 10, 16)
	return err == nil && host != "" && wrong == nil && n > 0
}

// errUser is the error of an address with a user or a password.
var errUser = errors.New("an address has no user and no password: set ETCDCTL_USER and ETCDCTL_PASSWORD")

// failFast makes a call without a connection fail with the reason, instead of waiting for one.
func failFast(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker,
	opts ...grpc.CallOption,
) error {
	return call(ctx, method, request, reply, conn, append(opts, grpc.WaitForReady(false))...)
}

// connect waits until etcd accepts this client and answers a request.
func connect(ctx context.Context, cfg clientv3.Config, s *store) (rendezvous.Store, error) {
	s.ctx, s.end = context.WithCancelCause(context.Background())
	cfg.Context = s.ctx
	stop := context.AfterFunc(ctx, func() { s.end(context.Cause(ctx)) })
	defer stop()
	for last := error(nil); ; {
		client, err := clientv3.New(cfg) // logs in, if there is a user
		if err == nil {
			short, cancel := context.WithTimeout(ctx, dialTimeout)
			_, err = client.Get(clientv3.WithRequireLeader(short), s.prefix+"?", clientv3.WithCountOnly())
			cancel()
			if err == nil && stop() {
				s.client = client
				return s, nil
			}
			err = errors.Join(err, ignoreCanceled(client.Close()))
		}
		if ctx.Err() == nil {
			if last = err; !temporary(err) {
				s.end(err)
				return nil, fmt.Errorf("etcd: %w", err)
			}
		}
		if ended := pause.For(ctx, retryPause); ended != nil {
			s.end(ended)
			return nil, fmt.Errorf("%w (the last attempt: %v)", ended, last)
		}
	}
}

// store is a handle on an etcd cluster.
type store struct {
	client  *clientv3.Client
	hosts   string        // for errors
	prefix  string        // of all keys
	timeout time.Duration // without an answer, after which the store is lost
	ctx     context.Context
	end     context.CancelCauseFunc
}

// call calls do with a context that also ends with Close, and maps its error to those of a store.
func (s *store) call(ctx context.Context, wrong error, do func(ctx context.Context) error) error {
	if wrong != nil {
		return wrong
	}
	ctx, cancel := context.WithCancelCause(clientv3.WithRequireLeader(ctx)) // a member without a leader reports an error
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(rendezvous.ErrClosed) })()
	if s.ctx.Err() != nil {
		return rendezvous.ErrClosed
	}
	err := do(ctx)
	switch {
	case err != nil && s.ctx.Err() != nil: // a call ended by Close may return before ctx ends
		return rendezvous.ErrClosed
	case err != nil && ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)):
		return context.Cause(ctx)
	case errors.Is(err, rpctypes.ErrCompacted):
		return rendezvous.ErrCompacted
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%w: %w", rendezvous.ErrFull, err)
	}
	return err
}

// repeat calls do, which changes nothing or may be repeated, until etcd answers.
func (s *store) repeat(ctx context.Context, do func(ctx context.Context) error) error {
	return s.retry(ctx, true, do)
}

// write calls do, which changes etcd, again only if the request was certainly not sent.
func (s *store) write(ctx context.Context, do func(ctx context.Context) error) error {
	return s.retry(ctx, false, do)
}

func (s *store) retry(ctx context.Context, repeatable bool, do func(ctx context.Context) error) error {
	for begin, last := time.Now(), error(nil); ; {
		short, cancel := context.WithTimeout(ctx, max(s.timeout-time.Since(begin), callTimeout))
		tracked, sent := trackSend(short)
		err := do(tracked)
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil && last != nil:
			return fmt.Errorf("%w (the last attempt: %v)", context.Cause(ctx), last)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !temporary(err) || !repeatable && sent.Load():
			return fmt.Errorf("etcd: %w", err)
		case time.Since(begin) > s.timeout:
			return fmt.Errorf("%w: etcd: %w", rendezvous.ErrLost, err)
		}
		last = err
		if err := pause.For(ctx, retryPause); err != nil {
			return fmt.Errorf("%w (the last attempt: %v)", err, last)
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

// Close implements [rendezvous.Store].
func (s *store) Close() error {
	s.end(rendezvous.ErrClosed)
	return ignoreCanceled(s.client.Close())
}

// ignoreCanceled returns the error of a client's Close, unless it is that of the client's own context.
func ignoreCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// checkPair returns an error for an invalid key or value.
func checkPair(key string, value []byte) error {
	if err := rendezvous.CheckKey(key); err != nil {
		return err
	}
	return rendezvous.CheckValue(key, value)
}
