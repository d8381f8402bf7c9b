// Package storetest is the conformance suite of stores: it tests any implementation of the properties that package
// rendezvous needs.
package storetest

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// Stores creates stores of one implementation.
type Stores struct {
	// New creates an empty store and returns a function that opens it. Each call of open returns another client of the
	// same store; the suite closes them. New removes the store with t.Cleanup.
	New func(t *testing.T) (open func() rendezvous.Store)
	// Slow reports that an operation takes milliseconds; the suite then makes fewer of them.
	Slow bool
}

// Run tests the contract of [rendezvous.Store]. It also verifies that no goroutine is left after each test.
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

// times returns how often a test does something with a store of usual speed, or with a slow one.
func (s *suite) times(usual, slow int) int {
	if s.slow {
		return slow
	}
	return usual
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
	{"Wait", testWait},
	{"WaitsEndWithTheContext", testContext},
	{"Close", testClose},
	{"OneCreates", testOneCreates},
	{"NoLostUpdate", testNoLostUpdate},
	{"Fence", testFence},
	{"FenceInTime", testFenceInTime},
	{"Model", testModel},
	{"Linearizable", testLinearizable},
	{"Follower", testFollower},
}
