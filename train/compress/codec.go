package compress

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Method is a way to encode gradients.
type Method uint8

// The methods.
const (
	None     Method = iota // float32 as it is
	BFloat16               // the upper half of float32
	Float16                // IEEE 754's binary16
	Int8                   // blocks of 8-bit integers, with error feedback
	PowerSGD               // matrices of low rank, with error feedback
)

var methods = [...]string{"none", "bfloat16", "float16", "int8", "powersgd"}

// String returns the method's name: "bfloat16".
func (m Method) String() string {
	if int(m) < len(methods) {
		return methods[m]
	}
	return fmt.Sprintf("Method(%d)", uint8(m))
}

// Codec specifies how gradients are exchanged. The zero value exchanges them as they are. All replicas must use the
// same.
type Codec struct {
	Method Method
	// Rank is the rank of PowerSGD's matrices: the larger, the more exact and the more bytes. Default: 1.
	Rank int
	// After is the number of steps that PowerSGD takes uncompressed before its first compressed one. Gradients change
	// most at the beginning, so a few hundred to a thousand steps can help the final accuracy. Default: 0.
	After int64
}

// Parse returns the codec that String describes: "none", "bfloat16", "float16", "int8", "powersgd", "powersgd:RANK" or
// "powersgd:RANK:AFTER".
func Parse(text string) (Codec, error) {
	words := strings.Split(text, ":")
	c := Codec{}
	for m, name := range methods {
		if words[0] == name {
			c.Method = Method(m)
			if c.Method == PowerSGD {
				c.Rank = 1
			}
			err := c.parse(words[1:])
			if err == nil {
				err = c.Check()
			}
			if err != nil {
				return Codec{}, fmt.Errorf("compression %q: %w", text, err)
			}
			return c, nil
		}
	}
	return Codec{}, fmt.Errorf("compression %q is unknown: want one of %s, the last also as powersgd:RANK or "+
		"powersgd:RANK:AFTER", text, strings.Join(methods[:], ", "))
}

// parse sets rank and steps.
func (c *Codec) parse(words []string) (err error) {
	switch {
	case len(words) > 0 && c.Method != PowerSGD:
		return errors.New("only powersgd has a rank")
	case len(words) > 2:
		return errors.New("want at most powersgd:RANK:AFTER")
	}
	if len(words) > 0 {
		if c.Rank, err = strconv.Atoi(words[0]); err != nil || c.Rank < 1 {
			return fmt.Errorf("the rank is %q: want a number from 1", words[0])
		}
	}
	if len(words) > 1 {
		if c.After, err = strconv.ParseInt(words[1], 10, 64); err != nil || c.After < 0 {
			return fmt.Errorf("the number of uncompressed steps is %q: want a number from 0", words[1])
		}
	}
	return nil
}

// rankMax bounds the rank. The time to orthogonalize grows with its square, and nothing is saved long before.
const rankMax = 256

// Check returns an error if the codec is invalid.
func (c Codec) Check() error {
	switch {
	case int(c.Method) >= len(methods):
		return fmt.Errorf("%v is not a method of compression", c.Method)
	case c.Method != PowerSGD && (c.Rank != 0 || c.After != 0):
		return fmt.Errorf("%v has Rank %d and After %d: only PowerSGD uses them", c.Method, c.Rank, c.After)
	case c.Rank < 0 || c.Rank > rankMax:
		return fmt.Errorf("the rank of PowerSGD is %d: want 1 to %d", c.Rank, rankMax)
	case c.After < 0:
		return fmt.Errorf("the number of PowerSGD's uncompressed steps is %d: want 0 or more", c.After)
	}
	return nil
}

// String returns the codec in the form of [Parse].
func (c Codec) String() string {
	if c.Method != PowerSGD {
		return c.Method.String()
	}
	text := fmt.Sprintf("%v:%d", c.Method, max(1, c.Rank))
	if c.After > 0 {
		text += fmt.Sprintf(":%d", c.After)
	}
	return text
}

// Parameter describes a gradient.
type Parameter struct {
	Name  string
	DType tensor.DType
	Shape []int
}

// Hash returns a hash of the names of a bucket's gradients, in their order.
func Hash(names []string) string {
	return fmt.Sprintf("%016x", xxh3.HashString(strings.Join(names, "\n")))
}

// callName names the encoded gradients of a bucket, so that a call fails if replicas have encoded those of others.
func callName(what string, parameters []Parameter) string {
	names := make([]string, len(parameters))
	for i, p := range parameters {
		names[i] = p.Name
	}
	return what + " (hash of names: " + Hash(names) + ")"
}

// Op is the operation of a [Call].
type Op uint8

// The operations.
const (
	AllReduce Op = iota // sums the replicas' Src into every Dst, along the canonical tree
	AllToAll            // part i of Src goes to replica i, into the part of its Dst that belongs to the sender
	AllGather           // Dst is the Src of all replicas, in their order
)

// Call describes a collective call that all replicas make. Its memory belongs to the call until it has ended.
type Call struct {
	Op Op
	// Dst and Src are lists of tensors that an AllReduce sums in place, or one tensor of bytes each; the Src of an
	// AllGather is the replica's part of Dst.
	Dst, Src []*tensor.Tensor
	Names    []string // of the tensors, for errors
}

// Exchange exchanges one replica's gradients of one bucket. Its methods do not block and must not run at once. After
// the first step they do not allocate.
type Exchange interface {
	// Start encodes the gradients: one tensor per parameter, which belong to the exchange until the last Next has
	// returned. step counts the steps taken before this one. It returns the calls of each round: one round, or two. They
	// are valid until the next Start. A Start without the Commit or Discard of the one before discards that one.
	Start(gradients []*tensor.Tensor, step int64) (rounds [][]Call)
	// Next is called once for each round, on any goroutine: when the calls of the round have ended on this replica, and
	// before those of the next round begin, whose data it computes. After the last round it stores the sums over all
	// replicas in the gradients.
	Next()
	// Commit makes the residual of the last exchange that of the next one. Without a completed exchange it does nothing.
	Commit()
	// Discard keeps the residual that was there before Start.
	Discard()
	// State lists what the exchange keeps from step to step. The tensors are its memory: to restore a state, write to
	// them between two steps.
	State() []State
}

// State is a part of what an [Exchange] keeps.
type State struct {
	Name string
	// Shared: it is the same on all replicas. Otherwise it differs; then only the sum over all replicas matters, so that
	// any number of replicas can share it.
	Shared bool
	Value  *tensor.Tensor
}

// New returns the exchange of the gradients of these parameters for one of several replicas. It panics if the codec is
// invalid or its method is [None]. seed must be equal on all replicas.
func (c Codec) New(parameters []Parameter, replica, replicas int, seed uint64) Exchange {
	if err := c.Check(); err != nil {
		panic("compress: " + err.Error())
	}
	switch c.Method {
	case BFloat16:
		return newHalf(tensor.BFloat16, parameters)
	case Float16:
		return newHalf(tensor.Float16, parameters)
	case Int8:
		return newBlocks(parameters, replica, replicas)
	case PowerSGD:
		return newPowerSGD(parameters, max(1, c.Rank), c.After, replicas, seed)
	}
	panic(fmt.Sprintf("compress: %v needs no exchange", c.Method))
}
