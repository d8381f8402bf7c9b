package launch

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// EtcdConfig says how etcd is spoken to, besides where it is. The zero value is for one without encryption and users.
type EtcdConfig struct {
	TLS            *tls.Config // for endpoints that begin with https://
	User, Password string
}

// EtcdFromEnvironment returns the configuration that etcdctl would take from the environment: ETCDCTL_CACERT, ETCDCTL_CERT and
// ETCDCTL_KEY, which name files, ETCDCTL_USER ("name:password" or "name") and ETCDCTL_PASSWORD.
func EtcdFromEnvironment(getenv func(string) string, readFile func(string) ([]byte, error)) (EtcdConfig, error) {
	c := EtcdConfig{TLS: &tls.Config{MinVersion: tls.VersionTLS12}}
	c.User, c.Password, _ = strings.Cut(getenv("ETCDCTL_USER"), ":")
	if p := getenv("ETCDCTL_PASSWORD"); p != "" {
		c.Password = p
	}
	if name := getenv("ETCDCTL_CACERT"); name != "" {
		text, err := readFile(name)
		if err != nil {
			return c, fmt.Errorf("launch: ETCDCTL_CACERT: %w", err)
		}
		c.TLS.RootCAs = x509.NewCertPool()
		if !c.TLS.RootCAs.AppendCertsFromPEM(text) {
			return c, fmt.Errorf("launch: ETCDCTL_CACERT: %s holds no certificate", name)
		}
	}
	cert, key := getenv("ETCDCTL_CERT"), getenv("ETCDCTL_KEY")
	if cert == "" && key == "" {
		return c, nil
	}
	certText, err1 := readFile(cert)
	keyText, err2 := readFile(key)
	if err := errors.Join(err1, err2); err != nil {
		return c, fmt.Errorf("launch: ETCDCTL_CERT and ETCDCTL_KEY: %w", err)
	}
	pair, err := tls.X509KeyPair(certText, keyText)
	if err != nil {
		return c, fmt.Errorf("launch: ETCDCTL_CERT and ETCDCTL_KEY: %w", err)
	}
	c.TLS.Certificates = []tls.Certificate{pair}
	return c, nil
}

// etcd is what the agents need of etcd: one key, by which the others find node 0, whose agent serves the job's store as ever. As torchrun's
// do, they meet through etcd, while the workers need not know of it. It speaks to etcd's JSON gateway, so that nothing has to be linked in.
type etcd struct {
	cfg       EtcdConfig
	client    *http.Client
	endpoints []string // http://host:port
	key       string
	token     string
}

// leaseTime is for how long the key outlives an agent that was killed.
const leaseTime = 20 * time.Second

// openEtcd reads "host:port,host:port/prefix"; each host may have a scheme.
func openEtcd(endpoint, job string, cfg EtcdConfig) (*etcd, error) {
	e := &etcd{cfg: cfg, client: &http.Client{Transport: &http.Transport{TLSClientConfig: cfg.TLS, Proxy: http.ProxyFromEnvironment}}}
	prefix := "lockstep"
	for part := range strings.SplitSeq(endpoint, ",") {
		if !strings.Contains(part, "://") {
			part = "http://" + part
		}
		u, err := url.Parse(part)
		if err != nil || u.Host == "" || u.Port() == "" || u.Scheme != "http" && u.Scheme != "https" {
			return nil, fmt.Errorf("etcd at %q: want host:port, or several with commas between, or https://host:port", endpoint)
		}
		if p := strings.Trim(u.Path, "/"); p != "" {
			prefix = p
		}
		e.endpoints = append(e.endpoints, u.Scheme+"://"+u.Host)
	}
	e.key = prefix + "/" + url.PathEscape(job) + "/store"
	return e, nil
}

// address is one of etcd's addresses, host:port.
func (e *etcd) address() string {
	_, address, _ := strings.Cut(e.endpoints[0], "://")
	return address
}

// kv is etcd's KeyValue; its gateway writes bytes as base64 and 64-bit numbers as strings, both of which encoding/json knows.
type kv struct {
	Key   []byte `json:"key,omitempty"`
	Value []byte `json:"value,omitempty"`
	Lease string `json:"lease,omitempty"`
}

// publish sets the key, and keeps it until the function that it returns is called.
func (e *etcd) publish(ctx context.Context, value string) (stop func(), err error) {
	var lease struct {
		ID string `json:"ID"`
	}
	if err := e.call(ctx, "lease/grant", map[string]string{"TTL": strconv.Itoa(int(leaseTime / time.Second))}, &lease); err != nil {
		return nil, err
	}
	if err := e.call(ctx, "kv/put", kv{[]byte(e.key), []byte(value), lease.ID}, nil); err != nil {
		return nil, err
	}
	keeping, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(leaseTime / 4)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = e.call(keeping, "lease/keepalive", map[string]string{"ID": lease.ID}, nil) // once all have met, nobody asks for it any more
			case <-keeping.Done():
				return
			}
		}
	}()
	return func() {
		cancel()
		<-done
		ctx, cancel := context.WithTimeout(context.Background(), farewellTime)
		defer cancel()
		_ = e.call(ctx, "lease/revoke", map[string]string{"ID": lease.ID}, nil) // takes the key with it; if not now, then when its time is over
		e.client.CloseIdleConnections()
	}, nil
}

// find waits until the key is there.
func (e *etcd) find(ctx context.Context) (string, error) {
	defer e.client.CloseIdleConnections()
	for {
		var found struct {
			KVs []kv `json:"kvs"`
		}
		err := e.call(ctx, "kv/range", kv{Key: []byte(e.key)}, &found)
		if err == nil && len(found.KVs) > 0 {
			return string(found.KVs[0].Value), nil
		}
		select {
		case <-time.After(findPause):
		case <-ctx.Done():
			if err == nil {
				err = fmt.Errorf("node 0 has not come: there is no key %s", e.key)
			}
			return "", fmt.Errorf("etcd at %s: %w", strings.Join(e.endpoints, ", "), err)
		}
	}
}

const (
	findPause  = 300 * time.Millisecond // between two looks for the key
	callTime   = 5 * time.Second        // for one of the addresses to answer
	answersMax = 1 << 20                // bytes
)

// call asks one of etcd's addresses after the other, and proves who it is if it has to.
func (e *etcd) call(ctx context.Context, method string, request, answer any) error {
	if e.cfg.User != "" && e.token == "" && method != "auth/authenticate" {
		var got struct {
			Token string `json:"token"`
		}
		if err := e.call(ctx, "auth/authenticate", map[string]string{"name": e.cfg.User, "password": e.cfg.Password}, &got); err != nil {
			return err
		}
		e.token = got.Token
	}
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	var errs []error
	for _, endpoint := range e.endpoints {
		err := e.ask(ctx, endpoint+"/v3/"+method, body, answer)
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (e *etcd) ask(ctx context.Context, address string, body []byte, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, address, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if e.token != "" {
		req.Header.Set("Authorization", e.token)
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, answersMax))
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("%s answers %s: %s", address, resp.Status, bytes.TrimSpace(text[:min(len(text), 200)]))
	case answer == nil:
		return nil
	}
	return json.Unmarshal(text, answer)
}
