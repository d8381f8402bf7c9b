package secret

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"strconv"
	"time"
)

// TLS returns the configuration of this process for mutual TLS 1.3 with the other workers, as client and as
// server, at any address. It has a fresh certificate, signed by the authority that all workers of the job
// derive from the secret. The peer must present a certificate of the same authority, job and epoch. It panics
// for the zero Secret.
//
// The authority's key is not limited to one host: every worker has it, and could impersonate any other.
// Validity does not depend on clocks, so hosts may disagree on the time.
func (s Secret) TLS(job string, epoch uint32) (*tls.Config, error) {
	if len(job) > jobMax {
		return nil, fmt.Errorf("secret: the job's name has %d bytes, want at most %d", len(job), jobMax)
	}
	authority, key, err := s.authority(job)
	if err != nil {
		return nil, fmt.Errorf("secret: making the authority of job %q: %w", job, err)
	}
	name := member(job, epoch)
	own, err := newCertificate(authority, key, name)
	if err != nil {
		return nil, fmt.Errorf("secret: making a certificate for job %q: %w", job, err)
	}
	v := &verifier{authority: x509.NewCertPool(), job: job, epoch: epoch}
	v.authority.AddCert(authority)
	return &tls.Config{
		Certificates: []tls.Certificate{own},
		MinVersion:   tls.VersionTLS13,
		ClientAuth:   tls.RequireAnyClientCert,
		// Package tls can verify the names of hosts only, and of servers only. VerifyConnection does the
		// whole verification, on both sides.
		InsecureSkipVerify:     true,
		VerifyConnection:       v.verify,
		SessionTicketsDisabled: true, // every connection authenticates
	}, nil
}

// jobMax bounds a job's name, which is part of certificates.
const jobMax = 1 << 10

// notBefore and notAfter make certificates independent of clocks; RFC 5280 has the latter for certificates without an
// end.
var (
	notBefore = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	notAfter  = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
)

// authority returns the job's authority: the same bytes in every process.
func (s Secret) authority(job string) (*x509.Certificate, ed25519.PrivateKey, error) {
	key := ed25519.NewKeyFromSeed(s.derive("authority", job))
	sum := sha256.Sum256([]byte(job))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "lockstep job " + hex.EncodeToString(sum[:8])},
		SubjectKeyId: sum[:20],
		NotBefore:    notBefore, NotAfter: notAfter, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(nil, template, template, key.Public(), key)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return cert, key, err
}

// newCertificate creates a key that never leaves this process, and its certificate.
func newCertificate(authority *x509.Certificate, by ed25519.PrivateKey, name *url.URL) (tls.Certificate, error) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, URIs: []*url.URL{name}, NotBefore: notBefore, NotAfter: notAfter, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{
			x509.ExtKeyUsageServerAuth,
			x509.ExtKeyUsageClientAuth,
		},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, authority, public, by)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}, nil
}

// member returns the name in certificates: "lockstep://worker?epoch=3&job=mnist".
func member(job string, epoch uint32) *url.URL {
	q := url.Values{"job": {job}, "epoch": {strconv.FormatUint(uint64(epoch), 10)}}
	return &url.URL{Scheme: "lockstep", Host: "worker", RawQuery: q.Encode()}
}

// verifier checks whether the peer belongs to the job.
type verifier struct {
	authority *x509.CertPool
	job       string
	epoch     uint32
}

func (v *verifier) verify(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("the other end shows no certificate: it belongs to no job")
	}
	cert := state.PeerCertificates[0]
	job, epoch, named := claimed(cert)
	_, err := cert.Verify(x509.VerifyOptions{
		Roots: v.authority, CurrentTime: notBefore.Add(time.Hour),
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	switch {
	case err != nil && !named:
		return fmt.Errorf("the other end's certificate is not one of a Lockstep job: %w", err)
	case err != nil && job != v.job:
		return fmt.Errorf("the other end says that it is of job %q, this is job %q", job, v.job)
	case err != nil:
		return fmt.Errorf("the other end has another secret for job %q than this one", v.job)
	case !named || job != v.job:
		return fmt.Errorf("the other end's certificate is for job %q, this is job %q", job, v.job)
	case epoch != v.epoch:
		return fmt.Errorf("the other end is in epoch %d of job %q, this end in epoch %d", epoch, v.job, v.epoch)
	}
	return nil
}

// claimed returns the job and the epoch in a certificate, verified or not.
func claimed(cert *x509.Certificate) (job string, epoch uint32, ok bool) {
	if len(cert.URIs) != 1 || cert.URIs[0].Scheme != "lockstep" || cert.URIs[0].Host != "worker" {
		return "", 0, false
	}
	q, err := url.ParseQuery(cert.URIs[0].RawQuery)
	if err != nil {
		return "", 0, false
	}
	n, err := strconv.ParseUint(q.Get("epoch"), 10, 32)
	return q.Get("job"), uint32(n), err == nil && q.Has("job")
}
