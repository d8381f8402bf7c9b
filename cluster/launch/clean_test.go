//go:build unix

package launch

import (
	"errors"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestCleanDuringNewRun: the agent that cleans up after a run of a lasting store deletes no key of a later run with
// this name, at whichever key it is suspended while that one begins; otherwise it deletes all keys of its run.
func TestCleanDuringNewRun(t *testing.T) {
	newNode := func(store rendezvous.Store, node int) *peers {
		return newPeers(&Agent{cfg: Config{
			ID: "lockstep", Node: node, Nodes: 2, Store: store, HeartbeatTimeout: time.Hour, RestartsMax: 3,
		}})
	}
	sit := func(p *peers) {
		t.Helper()
		mine := registration{Node: p.node, Workers: 1, Ports: []int{1}, RestartsMax: 3}
		if err := p.takeSlot(t.Context(), mine); err != nil {
			t.Fatal(err)
		}
	}
	const worker = "lockstep/0/worker/join/registration/0"
	for _, suspendedAt := range []string{
		"", "=launch/lockstep/event/slot/0", "=launch/lockstep/event/slot/1", "=launch/lockstep/reporter/0",
		"=launch/lockstep/reporter/1", "lockstep/heartbeats/0", "lockstep/0/worker/left/0", "=jobs/lockstep",
	} {
		t.Run(suspendedAt, func(t *testing.T) {
			memory := rendezvous.NewMemory()
			store := memory.Open()
			suspended := &between{Store: memory.Open(), key: suspendedAt}
			old := []*peers{newNode(suspended, 0), newNode(store, 1)}
			for _, p := range old {
				sit(p)
			}
			if err := store.Set(t.Context(), "lockstep/0/worker/left/0", nil); err != nil {
				t.Fatal(err)
			}
			old[0].endJob(t.Context(), 0, "")
			for _, p := range old {
				if !p.leave() {
					t.Fatalf("node %d has no slot", p.node)
				}
			}
			var begun []*peers
			suspended.call = func() {
				begun = []*peers{newNode(store, 1), newNode(store, 0)}
				for _, p := range begun {
					sit(p)
				}
				if err := store.Set(t.Context(), worker, []byte("new")); err != nil { // its agents have both joined
					t.Fatal(err)
				}
			}
			old[0].clean()
			if suspendedAt == "" {
				entries, _, err := store.List(t.Context(), "")
				if err != nil || len(entries) != 1 || entries[0].Key != "=launch/lockstep/event/ended" {
					t.Errorf("left: %v, %v", entries, err)
				}
				return
			}
			if begun == nil {
				t.Fatal("the clean-up has not deleted the key")
			}
			for _, p := range begun {
				slots, _, _, err := p.read(t.Context())
				if err != nil || slots[p.node] == nil || slots[p.node].Nonce != p.nonce {
					t.Errorf("node %d has lost its slot: %v, %v", p.node, slots, err)
				}
				if err := p.reporter.First(t.Context()); err != nil {
					t.Errorf("a report of node %d: %v", p.node, err)
				}
			}
			if _, _, err := store.Get(t.Context(), worker); err != nil {
				t.Errorf("a worker's key: %v", err)
			}
			if err := old[1].reporter.First(t.Context()); !errors.Is(err, rendezvous.ErrFenced) {
				t.Errorf("a report of the earlier run: %v", err)
			}
		})
	}
}

// TestEndOfNewRunStays: an agent that removes the end of an earlier run does not remove one that was written since.
func TestEndOfNewRunStays(t *testing.T) {
	memory := rendezvous.NewMemory()
	key := "=launch/lockstep/event/ended"
	store := &between{Store: memory.Open(), key: key}
	p := newPeers(&Agent{cfg: Config{ID: "lockstep", Nodes: 2, Store: store, HeartbeatTimeout: time.Hour}})
	if err := memory.Open().Set(t.Context(), key, []byte(`{"node":1,"code":7}`)); err != nil {
		t.Fatal(err)
	}
	_, held, err := p.readEnd(t.Context())
	if err != nil || len(held) != 1 {
		t.Fatal(held, err)
	}
	if err := memory.Open().Set(t.Context(), key, []byte(`{"node":1,"code":8}`)); err != nil {
		t.Fatal(err)
	}
	if err := p.clear(t.Context(), held[0]); err != nil {
		t.Fatal(err)
	}
	if o, _, err := p.readEnd(t.Context()); err != nil || o == nil || o.Code != 8 {
		t.Errorf("the end is %v, %v", o, err)
	}
}
