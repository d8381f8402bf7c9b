package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
)

// Fence returns a handle on a store for a process of an epoch of a job that has joined it: the epoch is the fencing
// token of all its writes. Once the job is in another epoch, or all its keys are deleted, the store refuses them with
// [ErrFenced], however long the process was suspended between its last look at the store and a write. The store
// compares the token in the same operation as it makes the change. Reads are not restricted. The handle shares s, whose
// Close it calls.
func Fence(s Store, job string, epoch uint32) Store {
	return WithToken(s, Token{jobKey(job) + epochKey, epochText(epoch)})
}

// WithToken returns a handle on a store whose writes have a token: the store refuses them with [ErrFenced] while the
// token's key does not have its value, of at most [TokenMax] bytes. Reads are not restricted. The handle shares s,
// whose Close it calls. If s has another token already, every write is an error: a write has one.
func WithToken(s Store, token Token) Store { return &fenced{s, token} }

// DeleteValue deletes a key if it has that value, of at most [TokenMax] bytes: not if another process has changed it
// since it was read. Then DeleteValue does nothing, and returns nil.
func DeleteValue(ctx context.Context, s Store, key string, value []byte) error {
	err := WithToken(s, Token{key, value}).Delete(ctx, key)
	if errors.Is(err, ErrFenced) {
		return nil
	}
	return err
}

// TokenMax is the largest size of a token's value, in bytes.
const TokenMax = 1<<16 - 1

// epochText is the value of the key of a job's epoch.
func epochText(epoch uint32) []byte { return strconv.AppendUint(nil, uint64(epoch), 10) }

// ErrFenced: the epoch of this process's job is over: its writes to the store are refused. It is an [ErrEnded].
var ErrFenced error = fencedError{}

type fencedError struct{}

// Error implements error.
func (fencedError) Error() string {
	return "rendezvous: the store refuses this process: the job has ended, or was restarted at a later epoch without it"
}

// Is reports that no later call can succeed.
func (fencedError) Is(err error) bool { return err == ErrEnded || err == ErrLost }

// Token is the condition of a write: it takes effect only if Key has Value at that moment.
type Token struct {
	Key   string
	Value []byte
}

type tokenKey struct{}

// TokenOf returns the token that a change of a store must satisfy, and false if it has none. Implementations of [Store]
// call it in Set, Create, Swap and Delete, with the context that these get, and return [ErrFenced] if the token's key
// does not have its value.
func TokenOf(ctx context.Context) (Token, bool) {
	t, ok := ctx.Value(tokenKey{}).(Token)
	return t, ok
}

// fenced is a handle whose writes have a token.
type fenced struct {
	Store
	token Token
}

// with returns the context of a write with the token.
func (f *fenced) with(ctx context.Context) (context.Context, error) {
	if t, given := TokenOf(ctx); given && (t.Key != f.token.Key || !bytes.Equal(t.Value, f.token.Value)) {
		return nil, fmt.Errorf("rendezvous: a write has two tokens, of the keys %q and %q, want one: pass the store "+
			"without a token to WithToken, Fence and DeleteValue", t.Key, f.token.Key)
	}
	if n := len(f.token.Value); n > TokenMax {
		return nil, fmt.Errorf("rendezvous: the token %q of a write has %d bytes, want at most %d", f.token.Key, n, TokenMax)
	}
	return context.WithValue(ctx, tokenKey{}, f.token), nil
}

// Set implements [Store].
func (f *fenced) Set(ctx context.Context, key string, value []byte) error {
	ctx, err := f.with(ctx)
	if err != nil {
		return err
	}
	return f.Store.Set(ctx, key, value)
}

// Create implements [Store].
func (f *fenced) Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error) {
	if ctx, err = f.with(ctx); err != nil {
		return nil, false, err
	}
	return f.Store.Create(ctx, key, value)
}

// Swap implements [Store].
func (f *fenced) Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error) {
	if ctx, err = f.with(ctx); err != nil {
		return false, err
	}
	return f.Store.Swap(ctx, key, revision, value)
}

// Delete implements [Store].
func (f *fenced) Delete(ctx context.Context, key string) error {
	ctx, err := f.with(ctx)
	if err != nil {
		return err
	}
	return f.Store.Delete(ctx, key)
}

// permits returns [ErrFenced] if a token's key does not have its value. A write whose token is nil is always permitted.
func (t *table) permits(token *Token) error {
	if token == nil {
		return nil
	}
	if e, ok := t.get(token.Key); !ok || string(e.Value) != string(token.Value) {
		return ErrFenced
	}
	return nil
}

// tokenOf is [TokenOf], nil for none.
func tokenOf(ctx context.Context) *Token {
	if t, ok := TokenOf(ctx); ok {
		return &t
	}
	return nil
}
