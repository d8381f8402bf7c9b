package rendezvous

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// EtcdConfig configures the access to etcd, besides its addresses. The zero value is for etcd without
// encryption and users.
type EtcdConfig struct {
	TLS            *tls.Config // etcd's own certificates, for etcds://; they are unrelated to the job's
	User, Password string
}

// etcdFromEnvironment returns the configuration that etcdctl would read from the environment: ETCDCTL_CACERT,
// ETCDCTL_CERT and ETCDCTL_KEY, which name files, ETCDCTL_USER ("name:password" or "name") and
// ETCDCTL_PASSWORD.
func etcdFromEnvironment(getenv func(string) string, readFile func(string) ([]byte, error)) (EtcdConfig, error) {
	c := EtcdConfig{TLS: &tls.Config{MinVersion: tls.VersionTLS12}}
	c.User, c.Password, _ = strings.Cut(getenv("ETCDCTL_USER"), ":")
	if p := getenv("ETCDCTL_PASSWORD"); p != "" {
		c.Password = p
	}
	if name := getenv("ETCDCTL_CACERT"); name != "" {
		text, err := readFile(name)
		if err != nil {
			return c, fmt.Errorf("ETCDCTL_CACERT: %w", err)
		}
		c.TLS.RootCAs = x509.NewCertPool()
		if !c.TLS.RootCAs.AppendCertsFromPEM(text) {
			return c, fmt.Errorf("ETCDCTL_CACERT: %s holds no certificate", name)
		}
	}
	cert, key := getenv("ETCDCTL_CERT"), getenv("ETCDCTL_KEY")
	if cert == "" && key == "" {
		return c, nil
	}
	certText, err1 := readFile(cert)
	keyText, err2 := readFile(key)
	if err := errors.Join(err1, err2); err != nil {
		return c, fmt.Errorf("ETCDCTL_CERT and ETCDCTL_KEY: %w", err)
	}
	pair, err := tls.X509KeyPair(certText, keyText)
	if err != nil {
		return c, fmt.Errorf("ETCDCTL_CERT and ETCDCTL_KEY: %w", err)
	}
	c.TLS.Certificates = []tls.Certificate{pair}
	return c, nil
}

// gateway is a client of etcd's JSON gateway (gRPC calls as HTTP with JSON, which every etcd 3 serves at its
// client port unless disabled), so that a program needs no etcd library.
type gateway struct {
	client    *http.Client
	endpoints []string // http://host:port
	login     EtcdConfig
	timeout   time.Duration

	mu    sync.Mutex
	at    int // the endpoint that responded last
	token string
}

// newGateway parses "host:port,host:port".
func newGateway(scheme, hosts string, login EtcdConfig, cfg Config) (*gateway, error) {
	g := &gateway{login: login, timeout: cfg.ReconnectTimeout}
	for host := range strings.SplitSeq(hosts, ",") {
		if h, p, err := net.SplitHostPort(host); err != nil || h == "" || p == "" {
			return nil, fmt.Errorf("etcd at %q: want host:port, or several with commas between", hosts)
		}
		g.endpoints = append(g.endpoints, scheme+"://"+host)
	}
	g.client = &http.Client{Transport: &http.Transport{
		TLSClientConfig: login.TLS, Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, etcdDial)
			defer cancel()
			c, err := cfg.Dial(ctx, network, address)
			if tcp, ok := c.(*net.TCPConn); ok && err == nil {
				err = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: etcdDial, Interval: etcdDial, Count: 2})
			}
			return c, err
		},
	}}
	return g, nil
}

const (
	etcdDial  = 5 * time.Second        // for an endpoint to be reached, and to show that it is alive
	etcdCall  = 5 * time.Second        // for it to answer
	etcdPause = 100 * time.Millisecond // before all endpoints are tried again
	answerMax = 1 << 30                // bytes
)

// etcdError is an error response.
type etcdError struct {
	Code    int    `json:"code"` // gRPC's
	Message string `json:"message"`
}

// The gRPC codes that are handled.
const (
	codeDeadline        = 4
	codeExhausted       = 8
	codeOutOfRange      = 11
	codeUnavailable     = 14
	codeUnauthenticated = 16
)

func (e *etcdError) Error() string { return "etcd: " + e.Message }

// Is maps a response to the errors of a store.
func (e *etcdError) Is(target error) bool {
	switch target {
	case ErrFull:
		return e.Code == codeExhausted && strings.Contains(e.Message, "space")
	case ErrCompacted:
		return e.Code == codeOutOfRange && strings.Contains(e.Message, "compacted")
	}
	return false
}

// unsent is an error of a request that certainly had no effect.
type unsent struct{ error }

func (e unsent) Unwrap() error { return e.error }

// call sends a request to etcd and reads the response. It retries requests that are safe to repeat, on one
// endpoint after the other: reads, and changes that certainly were not made. After timeout the store is
// lost.
func (g *gateway) call(ctx context.Context, method string, question bool, request, answer any) error {
	return g.insist(ctx, question, func(endpoint string, there func()) error {
		return g.ask(ctx, endpoint, method, request, func(body io.Reader) error {
			there()
			return json.NewDecoder(body).Decode(answer)
		})
	})
}

// insist calls attempt with one endpoint after the other. attempt must call its last argument when the
// endpoint has responded.
func (g *gateway) insist(ctx context.Context, question bool, attempt func(endpoint string, there func()) error) error {
	begin, last := time.Now(), error(nil)
	there := func() { begin = time.Now() }
	for {
		more, err := g.each(ctx, question, func(endpoint string) error { return attempt(endpoint, there) })
		switch {
		case ctx.Err() != nil && last == nil:
			return context.Cause(ctx)
		case ctx.Err() != nil:
			return fmt.Errorf("%w (the last attempt: %v)", context.Cause(ctx), last)
		case err == nil || !more:
			return err
		case time.Since(begin) > g.timeout:
			return fmt.Errorf("%w: %w", ErrLost, err)
		}
		last = err
		select {
		case <-time.After(etcdPause):
		case <-ctx.Done():
			return fmt.Errorf("%w (the last attempt: %v)", context.Cause(ctx), last)
		}
	}
}

// again reports whether a failed request may be retried.
func again(err error, question bool) bool {
	if errors.Is(err, ErrCompacted) {
		return false
	}
	var refused *etcdError
	if errors.As(err, &refused) && refused.Code != codeUnavailable && refused.Code != codeDeadline {
		return false
	}
	var not unsent
	return question || errors.As(err, &not)
}

// each tries one endpoint after the other, beginning with the one that responded last, and reports whether
// all may be tried again.
func (g *gateway) each(ctx context.Context, question bool, attempt func(endpoint string) error) (more bool, err error) {
	g.mu.Lock()
	first := g.at
	g.mu.Unlock()
	var errs []error
	for i := range g.endpoints {
		at := (first + i) % len(g.endpoints)
		err := attempt(g.endpoints[at])
		if refused := (*etcdError)(nil); errors.As(err, &refused) && refused.Code == codeUnauthenticated && g.discardToken() {
			err = attempt(g.endpoints[at])
		}
		if err == nil {
			g.mu.Lock()
			g.at = at
			g.mu.Unlock()
			return false, nil
		}
		if ctx.Err() != nil || !again(err, question) {
			return false, err
		}
		errs = append(errs, err)
	}
	return true, errors.Join(errs...)
}

// ask sends a request to one endpoint, and passes the response to read.
func (g *gateway) ask(ctx context.Context, endpoint, method string, request any, read func(io.Reader) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer g.hurry(endpoint, cancel).Stop()
	body, err := g.begin(ctx, endpoint, method, request)
	if err != nil {
		return err
	}
	defer body.Close()
	return read(io.LimitReader(body, answerMax))
}

// hurry returns a timer that cancels a request without a timely response.
func (g *gateway) hurry(endpoint string, cancel context.CancelCauseFunc) *time.Timer {
	return time.AfterFunc(etcdDial+etcdCall, func() {
		cancel(fmt.Errorf("%s has not answered within %v", endpoint, etcdDial+etcdCall))
	})
}

// begin sends a request to one endpoint, and returns the response's body. It ends with ctx; the caller closes
// it.
func (g *gateway) begin(ctx context.Context, endpoint, method string, request any) (io.ReadCloser, error) {
	token, err := g.proof(ctx, endpoint, method)
	if err != nil {
		return nil, unsent{err}
	}
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, endpoint+"/v3/"+method, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Grpc-Metadata-hasleader", "true") // makes a member without a leader report an error
	if token != "" {
		req.Header.Set("Authorization", token)
	}
	resp, err := g.client.Do(req)
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" {
		return nil, unsent{err}
	}
	if err != nil && ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	refused := &etcdError{}
	if json.Unmarshal(text, refused) != nil || refused.Message == "" {
		refused.Message = fmt.Sprintf("%s answers %s: %.200q: not an etcd with a JSON gateway", endpoint, resp.Status, text)
		if resp.StatusCode >= http.StatusBadGateway { // a proxy's, for example
			refused.Code = codeUnavailable
		}
	}
	return nil, refused
}

// proof returns the authentication token of this process, if etcd has users.
func (g *gateway) proof(ctx context.Context, endpoint, method string) (string, error) {
	if g.login.User == "" || method == "auth/authenticate" {
		return "", nil
	}
	g.mu.Lock()
	token := g.token
	g.mu.Unlock()
	if token != "" {
		return token, nil
	}
	var got struct {
		Token string `json:"token"`
	}
	login := map[string]string{"name": g.login.User, "password": g.login.Password}
	if err := g.ask(ctx, endpoint, "auth/authenticate", login,
		func(r io.Reader) error { return json.NewDecoder(r).Decode(&got) }); err != nil {
		return "", err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.token = got.Token
	return got.Token, nil
}

// discardToken makes the next request fetch a new token. It returns false if there are no tokens.
func (g *gateway) discardToken() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.token = ""
	return g.login.User != ""
}
