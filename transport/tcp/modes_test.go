package tcp_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// authority makes certificates for 127.0.0.1, and configurations that require certificates of the same authority.
func authority(t testing.TB) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, RootCAs: pool, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13,
	}
}

// noSocket is a connection that is not a socket: a node transfers its bytes in goroutines.
type noSocket struct{ net.Conn }

type noSockets struct{ net.Listener }

func (l noSockets) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return noSocket{c}, err
}

func withoutSockets(t testing.TB, cfg tcp.Config) tcp.Config {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Listener = noSockets{l}
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return noSocket{c}, err
	}
	return cfg
}

// TestConformanceOfModes: the conformance suite with TLS, and over connections that are not sockets.
func TestConformanceOfModes(t *testing.T) {
	if testing.Short() {
		t.Skip("all ways to move bytes are tried in the long run only")
	}
	secure := authority(t)
	for _, mode := range []struct {
		name      string
		config    func(testing.TB) tcp.Config
		allocates bool
	}{
		{"TLS", func(testing.TB) tcp.Config { return tcp.Config{TLS: secure} }, true}, // package tls does
		{"no sockets", func(t testing.TB) tcp.Config { return withoutSockets(t, tcp.Config{}) }, false},
		{"TLS, no sockets", func(t testing.TB) tcp.Config { return withoutSockets(t, tcp.Config{TLS: secure}) }, true},
	} {
		t.Run(mode.name, func(t *testing.T) {
			transporttest.Run(t, transporttest.Transport{
				Open: func(t *testing.T, n int) []transport.Endpoint {
					return opened(t, n, 64, func(int) tcp.Config { return mode.config(t) })
				},
				Buffers: true, Allocates: mode.allocates, Large: 1 << 20,
			})
		})
	}
}

// proves authenticates by a secret that contains key.
func proves(key string) func(conn net.Conn, dialed bool, hello []byte) error {
	s, err := secret.Parse("a secret of these tests " + key)
	if err != nil {
		panic(err)
	}
	return s.Authenticate(secret.Group, "", 0)
}

// TestProof: processes that cannot prove that they belong to the job are refused, with a reason.
func TestProof(t *testing.T) {
	for _, c := range []struct {
		name       string
		good, evil tcp.Config
		want       string
	}{
		{"secret", tcp.Config{Authenticate: proves("a")}, tcp.Config{Authenticate: proves("b")}, "has another secret"},
		{"certificate", tcp.Config{TLS: authority(t)}, tcp.Config{TLS: authority(t)}, "certificate"},
		{"plain to TLS", tcp.Config{TLS: authority(t)}, tcp.Config{Handshake: 200 * time.Millisecond}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ends := opened(t, 2, 2, func(int) tcp.Config { return c.good })
			done := make(chan error, 2)
			for i, e := range ends {
				go func() {
					done <- e.Exchange(context.Background(), 1-i, transport.Frame{Data: []byte("abc")}, 1-i, make([]byte, 3))
				}()
			}
			for range ends {
				if err := <-done; err != nil {
					t.Error(err)
				}
			}
			for _, e := range ends {
				e.Close()
			}

			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			var wg sync.WaitGroup
			var addrs []string
			var nodes []*tcp.Node
			for _, cfg := range []tcp.Config{c.good, c.evil} {
				cfg.Logger = slog.New(slog.DiscardHandler)
				n, err := tcp.Listen(cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer n.Close()
				nodes, addrs = append(nodes, n), append(addrs, n.Addr())
			}
			waiting, enough := context.WithCancel(ctx)
			wg.Go(func() {
				if _, err := nodes[0].Group(waiting, tcp.GroupConfig{Addrs: addrs, Local: []int{0}}); err == nil {
					t.Error("the group accepted a process of another job")
				}
			})
			if c.want == "" { // it gets no answer
				var stop context.CancelFunc
				ctx, stop = context.WithCancel(ctx)
				wg.Go(func() {
					defer stop()
					for nodes[0].Refused()["proof"] == 0 && ctx.Err() == nil {
						time.Sleep(time.Millisecond)
					}
				})
			}
			_, err := nodes[1].Group(ctx, tcp.GroupConfig{Addrs: addrs, Local: []int{1}})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the refused process got %v, want %q in it", err, c.want)
			}
			enough()
			wg.Wait()
			// the node counts it a little later
			for since := time.Now(); nodes[0].Refused()["proof"] == 0; time.Sleep(time.Millisecond) {
				if time.Since(since) > time.Minute {
					t.Fatalf("counted %v, want a connection without proof", nodes[0].Refused())
				}
			}
		})
	}
}

func TestListen(t *testing.T) {
	a, err := tcp.Listen(tcp.Config{Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	_, port, _ := net.SplitHostPort(a.Addr())
	if _, err := tcp.Listen(tcp.Config{Listen: "127.0.0.1:" + port}); err == nil {
		t.Error("two nodes listen on one port")
	}
	b, err := tcp.Listen(tcp.Config{Listen: "127.0.0.1:" + port + "-65535"})
	if err != nil {
		t.Fatalf("no port in a range: %v", err)
	}
	defer b.Close()
	for _, bad := range []string{"127.0.0.1", "127.0.0.1:x", "127.0.0.1:9-8", "127.0.0.1:0-9", "127.0.0.1:1-70000"} {
		if n, err := tcp.Listen(tcp.Config{Listen: bad}); err == nil {
			n.Close()
			t.Errorf("Listen %q: no error", bad)
		} else if !strings.Contains(err.Error(), bad) {
			t.Errorf("Listen %q: %v does not name the fault", bad, err)
		}
	}
}

func TestGroupConfig(t *testing.T) {
	node, err := tcp.Listen(tcp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	for _, c := range []struct {
		cfg  tcp.GroupConfig
		want string
	}{
		{tcp.GroupConfig{}, "local ranks [] in a group of 0"},
		{tcp.GroupConfig{Addrs: []string{"x"}, Local: []int{0}}, "address of rank 0"},
		{
			tcp.GroupConfig{Addrs: []string{"h:1", "h:1", "g:1"}, Local: []int{0}},
			"local ranks [0], but ranks [0 1] have this process's address h:1",
		},
		{tcp.GroupConfig{Addrs: []string{"h:1"}, Local: []int{1}}, "local ranks [1] in a group of 1"},
	} {
		if _, err := node.Group(context.Background(), c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.want)
		}
	}
}
