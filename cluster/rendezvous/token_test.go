package rendezvous_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestTwoTokens: a store with a token that gets another one refuses every write, since it could compare only one of
// them. The same token twice is one.
func TestTwoTokens(t *testing.T) {
	ctx := t.Context()
	store := rendezvous.NewMemory().Open()
	for _, key := range []string{"a", "b", "held"} {
		if err := store.Set(ctx, key, []byte("1")); err != nil {
			t.Fatal(err)
		}
	}
	once := rendezvous.WithToken(store, rendezvous.Token{Key: "a", Value: []byte("1")})
	same := rendezvous.WithToken(once, rendezvous.Token{Key: "a", Value: []byte("1")})
	if err := same.Set(ctx, "held", []byte("2")); err != nil {
		t.Error(err)
	}
	for _, token := range []rendezvous.Token{{Key: "b", Value: []byte("1")}, {Key: "a", Value: []byte("2")}} {
		twice := rendezvous.WithToken(once, token)
		_, _, created := twice.Create(ctx, "new", nil)
		_, revision, err := store.Get(ctx, "held")
		if err != nil {
			t.Fatal(err)
		}
		_, swapped := twice.Swap(ctx, "held", revision, nil)
		for name, err := range map[string]error{
			"Set": twice.Set(ctx, "held", nil), "Create": created, "Swap": swapped, "Delete": twice.Delete(ctx, "held"),
			"DeleteValue": rendezvous.DeleteValue(ctx, once, "held", []byte("2")),
		} {
			if err == nil || errors.Is(err, rendezvous.ErrFenced) || !strings.Contains(err.Error(), "two tokens, of the keys") {
				t.Errorf("%s with %s = %s: error %v", name, token.Key, token.Value, err)
			}
		}
		if value, _, err := twice.Get(ctx, "held"); err != nil || string(value) != "2" {
			t.Errorf("%q, %v: something was written", value, err)
		}
	}
}

// TestStarterEnds: if the process that begins an epoch ends before it has deleted the keys of the earlier epochs, the
// one that begins the next epoch deletes them.
func TestStarterEnds(t *testing.T) {
	memory := rendezvous.NewMemory()
	for epoch := range uint32(3) {
		store := memory.Open()
		if err := store.Set(t.Context(), rendezvous.Key("digits", epoch, "other"), nil); err != nil {
			t.Fatal(err)
		}
		if epoch == 1 {
			store = endedAfterSwap{store}
		}
		own := registration(0, 1)
		own.Epoch = epoch
		if _, err := rendezvous.Join(t.Context(), store, own); (err != nil) != (epoch == 1) {
			t.Fatalf("epoch %d: %v", epoch, err)
		}
		left := 0
		for earlier := range epoch {
			entries, _, err := memory.Open().List(t.Context(), rendezvous.Key("digits", earlier))
			if err != nil {
				t.Fatal(err)
			}
			left += len(entries)
		}
		if (left > 0) != (epoch == 1) {
			t.Errorf("%d keys of earlier epochs are left in epoch %d", left, epoch)
		}
	}
}

// endedAfterSwap is the store of a process that ends once it has begun an epoch: it deletes nothing.
type endedAfterSwap struct{ rendezvous.Store }

func (endedAfterSwap) Delete(context.Context, string) error { return errEnded }

func (endedAfterSwap) List(context.Context, string) ([]rendezvous.Entry, uint64, error) {
	return nil, 0, errEnded
}

var errEnded = errors.New("the process has ended")
