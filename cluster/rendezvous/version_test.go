package rendezvous

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// TestOtherVersion: a process of another version is refused by every store, and by the rendezvous on any, with an error
// that names both.
func TestOtherVersion(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, stated := range []uint16{0, 1, Version + 1} {
		want := fmt.Sprintf("version %d of the rendezvous", versionOf(int(stated)))
		check := func(name string, err error) {
			t.Helper()
			if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), want) ||
				!strings.Contains(err.Error(), fmt.Sprintf("has version %d", Version)) {
				t.Errorf("%s: %v, want an error with %q", name, err, want)
			}
		}

		s, err := Serve(ctx, ServerConfig{Listen: "127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		hello := clientID{7}.hello()
		binary.LittleEndian.PutUint16(hello.Fields[len(clientID{}):], stated)
		dialer := listener.Dialer{Handshake: time.Second}
		_, err = dialer.DialContext(ctx, s.Addr(), hello)
		check("the TCP store", err)
		if refused := (*listener.Refusal)(nil); !errors.As(err, &refused) || refused.Reason != listener.Versions {
			t.Errorf("the TCP store: %v, want a refusal for its version", err)
		}
		s.Close()

		folder := t.TempDir()
		log := binary.LittleEndian.AppendUint16([]byte(logMagic), max(stated, 1))
		log = append(log, make([]byte, logHeaderBytes-len(log))...)
		if err := os.WriteFile(filepath.Join(folder, "lockstep-store.log"), log, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err = Open(ctx, "file://"+filepath.ToSlash(folder), Config{})
		check("a folder", err)

		store := NewMemory().Open()
		other, err := Registration{Worker: 1, Workers: 2, Host: "b", PID: 9}.filled()
		if err != nil {
			t.Fatal(err)
		}
		other.Version = int(stated)
		text, err := json.Marshal(&other)
		if err != nil {
			t.Fatal(err)
		}
		if err := store.Set(ctx, other.Key("worker/join/registration/1"), text); err != nil {
			t.Fatal(err)
		}
		_, err = Join(ctx, store, Registration{Worker: 0, Workers: 2})
		check("the rendezvous", err)
		if failed := (*JoinError)(nil); !errors.As(err, &failed) || failed.Kind != Mismatch {
			t.Errorf("the rendezvous: %v, want a mismatch", err)
		}
		store.Close()
	}
}

// TestVersionInDocs: the page of the rendezvous describes this version.
func TestVersionInDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/rendezvous.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("version %d of the rendezvous", Version); !strings.Contains(string(page), want) {
		t.Errorf("docs/rendezvous.md does not say %q", want)
	}
}

// TestNoPassword: errors about a store do not show the password in its URL.
func TestNoPassword(t *testing.T) {
	failing := func(context.Context, string, Config) (Store, error) { return nil, errors.New("it is down") }
	for _, url := range []string{"tcp://me:hunter2@127.0.0.1:1", "none://me:hunter2@a:1", "custom://me:hunter2@a:1"} {
		_, err := Open(t.Context(), url, Config{Schemes: map[string]Opener{"custom": failing}})
		if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "…@") {
			t.Errorf("%s: %v, want an error without the password", url, err)
		}
	}
}
