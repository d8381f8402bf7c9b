// Package dashboard serves the live page of a job: one page without outside requests, its JSON, server-sent events with
// the same data, and metrics for Prometheus. The state comes from a [status.Tracker].
//
// The page has no write access: it shows, and changes nothing. It is served on a loopback address without
// authentication, and on any other address only with a token, which the page's address has once and a cookie keeps.
package dashboard

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/timeline"
)

//go:embed page
var page embed.FS

// Source has the state that the page shows. A [status.Tracker] is one.
type Source interface {
	// Job returns the state now.
	Job() status.Job
	// Charts returns what the charts show after a step: see [status.Tracker.Charts].
	Charts(after, series int64) status.Charts
}

// Message is what the server sends: as an event, and as the JSON document at /api/job.
type Message struct {
	Job status.Job `json:"job"`
	status.Charts
}

const (
	sendEvery      = 500 * time.Millisecond
	streamsMax     = 64
	connectionsMax = 256 // so that strangers cannot take all file descriptors of the process
	headerBytesMax = 16 << 10
	requestTimeout = 10 * time.Second
)

// Server serves the page of one job.
type Server struct {
	source   Source
	listener net.Listener
	token    string // "": none
	cookie   string // its name: other dashboards on this host have others
	http     http.Server
	done     chan struct{}
	close    sync.Once
	feed     sync.WaitGroup // of ListenProcess

	mu          sync.Mutex // guards the fields below
	connections listener.Conns
	streams     listener.Conns // those of event streams
}

// Listen serves the page at an address: host:port, or :port for loopback. If the host is not a loopback address, a
// token is needed; an empty one is replaced by a random one. The caller must close the server.
func Listen(address string, source Source, token string) (*Server, error) {
	return listen(address, source, token, (*Server).pages)
}

// listen serves content on host:port, or on :port of loopback.
func listen(address string, source Source, token string, content func(*Server) http.Handler) (*Server, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("dashboard: the address %q: want host:port, such as localhost:8080 or :8080: %w", address, err)
	}
	if host == "" {
		host = "localhost"
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("dashboard: %w", err)
	}
	if !l.Addr().(*net.TCPAddr).IP.IsLoopback() && token == "" {
		token = rand.Text()
	}
	return serve(l, source, token, content), nil
}

// serve serves content at a listener until Close.
func serve(l net.Listener, source Source, token string, content func(*Server) http.Handler) *Server {
	s := &Server{
		source: source, listener: l, token: token, done: make(chan struct{}),
		connections: listener.Conns{Users: true}, streams: listener.Conns{Users: true},
	}
	name := sha256.Sum256([]byte(token))
	s.cookie = fmt.Sprintf("lockstep-%x", name[:6])
	s.http = http.Server{
		Handler: s.guard(content(s)), ReadTimeout: requestTimeout, WriteTimeout: requestTimeout, IdleTimeout: time.Minute,
		ConnState: s.count, MaxHeaderBytes: headerBytesMax,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connection{}, c)
		},
	}
	go func() { _ = s.http.Serve(l) }() // until Close
	return s
}

// URL returns the address of the page, with its token. A server of [ListenLocal] has none.
func (s *Server) URL() string {
	url := "http://" + s.listener.Addr().String() + "/"
	if s.token != "" {
		url += "?token=" + s.token
	}
	return url
}

// connection is the key of a request's connection in its context.
type connection struct{}

// count bounds the number of connections.
func (s *Server) count(c net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		s.add(&s.connections, c, connectionsMax)
	case http.StateClosed:
		s.remove(&s.connections, c)
	}
}

// add adds a connection to a set of at most limit. One more closes another: one of the address, or of the user of this
// host, that has the most, but not of this process' user while others have some.
func (s *Server) add(to *listener.Conns, c net.Conn, limit int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	to.Add(c)
	to.MakeRoom(limit)
}

func (s *Server) remove(from *listener.Conns, c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from.Remove(c)
}

// Close ends all connections. Closing again does nothing.
func (s *Server) Close() error {
	s.close.Do(func() { close(s.done) })
	defer s.feed.Wait()
	defer func() { _ = s.listener.Close() }() // the server closes it only if it has begun to serve
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := s.http.Shutdown(ctx); err != nil {
		return s.http.Close()
	}
	return nil
}

// pages are the page and the files that it requests.
func (s *Server) pages() http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /api/job", s.job)
	mux.HandleFunc("GET /api/events", s.events)
	mux.Handle("GET /metrics", s.metrics())
	return mux
}

// guard answers requests that have the token, or else come from this host.
func (s *Server) guard(content http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "+
			"img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		if !s.sameHost(r) {
			http.Error(w, "this name is not the dashboard's: use its address", http.StatusForbidden)
			return
		}
		if !s.authorized(w, r) {
			http.Error(w, "the dashboard needs its token: open the address that lockstep has printed, with ?token=…, or send "+
				"the header Authorization: Bearer TOKEN", http.StatusUnauthorized)
			return
		}
		content.ServeHTTP(w, r)
	})
}

// sameHost reports whether a request without a token names a loopback host. A page of another site whose name leads to
// this address (DNS rebinding) names its own.
func (s *Server) sameHost(r *http.Request) bool {
	if _, socket := s.listener.(*net.UnixListener); s.token != "" || socket {
		return true
	}
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// authorized reports whether the request has the token, and keeps one of the address in a cookie.
func (s *Server) authorized(w http.ResponseWriter, r *http.Request) bool {
	if s.token == "" {
		return true
	}
	same := func(token string) bool { return subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) == 1 }
	if same(r.URL.Query().Get("token")) {
		http.SetCookie(w, &http.Cookie{
			Name: s.cookie, Value: s.token, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode,
		})
		return true
	}
	if c, err := r.Cookie(s.cookie); err == nil && same(c.Value) {
		return true
	}
	bearer, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return ok && same(bearer)
}

func (s *Server) message(after, series int64) Message {
	charts := s.source.Charts(after, series)
	if charts.Points == nil {
		charts.Points = []status.Point{}
	}
	if charts.Measured == nil {
		charts.Measured = []timeline.Measurement{}
	}
	return Message{Job: s.source.Job(), Charts: charts}
}

// job answers with the state now and all points, or with those after the step of ?after=, if ?series= is current.
func (s *Server) job(w http.ResponseWriter, r *http.Request) {
	number := func(name string) int64 {
		n, _ := strconv.ParseInt(r.URL.Query().Get(name), 10, 64) // 0: all
		return n
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.message(number("after"), number("series"))) // else the client has disconnected
}

// events sends a message twice a second, until the client or the server ends.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connection{}).(net.Conn)
	s.add(&s.streams, c, streamsMax)
	defer s.remove(&s.streams, c)
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	if err := out.SetReadDeadline(time.Time{}); err != nil { // the stream lasts longer than a request
		return
	}
	var after, series int64
	fmt.Fprintf(w, "retry: 1000\n\n") // milliseconds, after a lost connection; Flush returns the error
	ticker := time.NewTicker(sendEvery)
	defer ticker.Stop()
	for {
		m := s.message(after, series)
		text, err := json.Marshal(m)
		if err == nil {
			err = out.SetWriteDeadline(time.Now().Add(10 * sendEvery))
		}
		if err == nil {
			_, err = fmt.Fprintf(w, "data: %s\n\n", text)
		}
		if err = errors.Join(err, out.Flush()); err != nil {
			return
		}
		if series = m.Series; len(m.Points) > 0 {
			after = m.Points[len(m.Points)-1].Step
		}
		select {
		case <-ticker.C:
		case <-r.Context().Done():
			return
		case <-s.done:
			return
		}
	}
}
