// Package storetest is the conformance suite of stores: what package rendezvous relies on, tried on any implementation.
package storetest

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// Stores makes stores of one implementation.
type Stores struct {
	// New makes a new, empty store, and returns what opens it. What it opens are different users of that one store; the suite
	// closes them. The store ends with the test, by t.Cleanup.
	New func(t *testing.T) (open func() rendezvous.Store)
	// Slow says that an operation takes milliseconds: the suite makes fewer of them.
	Slow bool
}

// Run tries everything that the contract of [rendezvous.Store] promises. After each test no goroutine is left.
func Run(t *testing.T, stores Stores) {
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			t.Cleanup(func() { // after those of New
				if err := goleak.Find(before); err != nil && !t.Failed() {
					t.Error(err)
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s := &suite{T: t, ctx: ctx, slow: stores.Slow}
			open := stores.New(t)
			s.open = func() rendezvous.Store {
				u := open()
				s.users = append(s.users, u)
				return u
			}
			defer func() {
				for _, u := range s.users {
					if err := u.Close(); err != nil {
						t.Errorf("Close: %v", err)
					}
				}
			}()
			test.run(s)
		})
	}
}

// suite is one test on one store.
type suite struct {
	*testing.T
	ctx   context.Context
	open  func() rendezvous.Store
	users []rendezvous.Store
	slow  bool
}

var tests = []struct {
	name string
	run  func(*suite)
}{
	{"Basics", testBasics},
	{"Bounds", testBounds},
	{"Large", testLarge},
	{"List", testList},
	{"ChangesOfThePast", testChangesPast},
	{"ChangesToCome", testChangesToCome},
	{"WaitsEndWithTheContext", testContext},
	{"Close", testClose},
	{"OneCreates", testOneCreates},
	{"NoLostUpdate", testNoLostUpdate},
	{"Model", testModel},
	{"Linearizable", testLinearizable},
	{"Follower", testFollower},
}
