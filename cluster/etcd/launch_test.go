package etcd_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/launch"
	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// TestLaunchersMeet: the agents of a job find each other through etcd, whichever comes first, and leave nothing there.
func TestLaunchersMeet(t *testing.T) {
	address := cluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	m := launch.Meeting{Backend: "etcd", Endpoint: address + "/jobs", ID: "a job", Secret: secret.New()}
	type opened struct {
		place *launch.Place
		err   error
	}
	second := make(chan opened, 1)
	go func() {
		p, err := m.Open(ctx)
		second <- opened{p, err}
	}()
	first := m
	first.Serve = true
	place, err := first.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	other := <-second
	if other.err != nil {
		t.Fatal(other.err)
	}
	if place.URL != other.place.URL || !strings.HasPrefix(place.URL, "tcp://127.0.0.1:") {
		t.Errorf("node 0 serves %s, the other found %s", place.URL, other.place.URL)
	}
	if err := other.place.Store.Set(ctx, "key", []byte("value")); err != nil {
		t.Fatal(err)
	}
	if got, _, err := place.Store.Get(ctx, "key"); err != nil || string(got) != "value" {
		t.Errorf("got %q, %v", got, err)
	}
	if err := other.place.Close(); err != nil {
		t.Error(err)
	}
	if err := place.Close(); err != nil {
		t.Error(err)
	}
	s := open(t, "etcd://"+address)
	defer s.Close()
	if left, _, err := s.List(ctx, ""); err != nil || len(left) > 0 {
		t.Errorf("left in etcd: %v, %v", left, err)
	}
	late, cancelLate := context.WithTimeout(ctx, 5*time.Second)
	defer cancelLate()
	if p, err := m.Open(late); err == nil || !strings.Contains(err.Error(), "node 0 has not come: there is no key jobs/a%20job/store") {
		t.Errorf("found %+v, %v", p, err)
	}
}
