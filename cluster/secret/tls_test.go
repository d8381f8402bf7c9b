package secret_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"
)

// handshake makes a TLS connection over loopback and returns the errors of both sides. The client's is that of its
// first read: in TLS 1.3 it is notified only then whether the server accepts its certificate.
func handshake(t *testing.T, client, server *tls.Config) (dialed, accepted error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Minute))
			s := tls.Server(c, server)
			if err = s.Handshake(); err == nil {
				_, err = s.Write([]byte("x"))
			}
		}
		done <- err
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	s := tls.Client(c, client)
	if dialed = s.Handshake(); dialed == nil {
		_, dialed = s.Read(make([]byte, 1))
	}
	c.Close()
	return dialed, <-done
}

// selfSigned is a configuration that belongs to no job.
func selfSigned(t *testing.T, change func(*tls.Config)) *tls.Config {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"worker"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{
		Certificates:       []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}},
		InsecureSkipVerify: true,
	}
	change(cfg)
	return cfg
}

func TestTLS(t *testing.T) {
	of := func(text, job string, epoch uint32) *tls.Config {
		t.Helper()
		cfg, err := parsed(t, text).TLS(job, epoch)
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	ours := of(text, `a "job"/with?odd&names=ü`, 3)
	expired := of(text, `a "job"/with?odd&names=ü`, 3)
	expired.Time = func() time.Time { return time.Unix(0, 0) }
	for _, c := range []struct {
		name           string
		client, server *tls.Config
		dialed         string // the dialer's error
		accepted       string
	}{
		{"of one job", ours, of(text, `a "job"/with?odd&names=ü`, 3), "", ""},
		{"clocks that differ by years", expired, ours, "", ""},
		{"another secret", of(text+"x", `a "job"/with?odd&names=ü`, 3), ours, "has another secret", "bad certificate"},
		{
			"another job", of(text, "b", 3), ours, `says that it is of job "a \"job\"/with?odd&names=ü", this is job "b"`,
			"bad certificate",
		},
		{"another epoch", of(text, `a "job"/with?odd&names=ü`, 2), ours, "the other end is in epoch 3", "bad certificate"},
		{"a self-signed server", ours, selfSigned(t, func(*tls.Config) {}), "not one of a Lockstep job", "bad certificate"},
		{"a self-signed client", selfSigned(t, func(*tls.Config) {}), ours, "bad certificate", "not one of a Lockstep job"},
		{
			"a client without a certificate", &tls.Config{InsecureSkipVerify: true}, ours, "certificate required",
			"client didn't provide a certificate",
		},
		{
			"TLS 1.2", selfSigned(t, func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }), ours, "protocol version",
			"unsupported versions",
		},
	} {
		dialed, accepted := handshake(t, c.client, c.server)
		for _, side := range []struct {
			name string
			err  error
			want string
		}{{"dials", dialed, c.dialed}, {"accepts", accepted, c.accepted}} {
			if side.want == "" && side.err != nil || side.want != "" && (side.err == nil || !strings.Contains(side.err.Error(),
				side.want)) {
				t.Errorf("%s: the one who %s says %v, want %q", c.name, side.name, side.err, side.want)
			}
		}
	}
	if _, err := parsed(t, text).TLS(strings.Repeat("x", 2000), 1); err == nil || !strings.Contains(err.Error(),
		"2000 bytes") {
		t.Errorf("a job with a long name: %v", err)
	}
}

// TestForged: a certificate with the right content, by an authority with the right content but another key.
func TestForged(t *testing.T) {
	ours, err := parsed(t, text).TLS("job", 3)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(ours.Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	public, private, _ := ed25519.GenerateKey(nil)
	forge := func(parent *x509.Certificate, by any) *tls.Config {
		template := *leaf
		template.AuthorityKeyId = nil
		der, err := x509.CreateCertificate(rand.Reader, &template, parent, public, by)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Config{
			InsecureSkipVerify: true,
			Certificates: []tls.Certificate{{
				Certificate: [][]byte{der, ours.Certificates[0].Certificate[0]},
				PrivateKey:  private,
			}},
		}
	}
	parent := &x509.Certificate{Subject: leaf.Issuer, SubjectKeyId: leaf.AuthorityKeyId}
	for name, cfg := range map[string]*tls.Config{
		"by another authority of that name": forge(parent, private),
		"by a worker's certificate":         forge(leaf, ours.Certificates[0].PrivateKey),
	} {
		if _, err := handshake(t, cfg, ours); err == nil || errors.Is(err, net.ErrClosed) {
			t.Errorf("a certificate %s: %v", name, err)
		}
	}
	stolen := &tls.Config{
		InsecureSkipVerify: true,
		Certificates:       []tls.Certificate{{Certificate: ours.Certificates[0].Certificate, PrivateKey: private}},
	}
	if _, err := handshake(t, stolen, ours); err == nil {
		t.Error("a worker's certificate with another key is taken")
	}
}
