package collective

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
)

// Config sets up a communicator. The zero value works. All fields but Timeout, Stall, Monitor, Describe and Logger must be equal on
// all ranks; a call of ranks that choose other algorithms is a mismatch.
type Config struct {
	// Name of the communicator in errors and logs. Default "world".
	Name string
	// Epoch is the membership of the job. Calls of different epochs never meet.
	Epoch uint32
	// Timeout bounds how long one call waits for its peers. Default 10 minutes; negative: for ever, which is said once in the log.
	Timeout time.Duration
	// Stall is how long a call waits before that is logged, once, with who waits for whom. Default 30 seconds; negative: never.
	Stall time.Duration
	// Order and Accumulate are the defaults of the calls' [Options]. Default Canonical and AccumulateDType.
	Order      Order
	Accumulate Accumulate
	// Algorithm names the row of [plan.Algorithms] that carries out the calls that name none themselves: "row" for all calls
	// that it can carry out, or "operation:row,operation:row", as in "all_reduce:direct". Default: the environment variable
	// LOCKSTEP_ALGORITHM, in the same form, then the chooser decides.
	Algorithm string
	// Chooser is the table by which algorithms are chosen. Default: the one that the environment variable
	// LOCKSTEP_TABLE names, else [chooser.Default].
	Chooser *chooser.Table
	// Monitor watches the calls. Default none.
	Monitor Monitor
	// Describe says who the ranks are that a failure concerns, and what they were last seen doing: [Error.Who]. It is called by the
	// first local rank that finds a failure, or is told of one, while all others here wait for it, so it must end in a few
	// seconds whatever has happened. The ranks of other processes get what it returns with the failure, if that takes
	// no longer than a tenth of a second; else they learn of the failure at once, and describe it themselves. Its
	// argument is the failure, in this communicator's ranks: those that it is about are
	// Peers or, of one that another process has told of, Rank. Default none.
	Describe func(*Error) string
	// Logger gets the warnings. Default slog.Default().
	Logger *slog.Logger
}

const (
	defaultTimeout = 10 * time.Minute
	defaultStall   = 30 * time.Second
)

// filled returns c with its defaults, or what is wrong with it.
func (c Config) filled() (Config, error) {
	if c.Name == "" {
		c.Name = "world"
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.Stall == 0 {
		c.Stall = defaultStall
	}
	if c.Order == OrderInherit {
		c.Order = Canonical
	}
	if c.Accumulate == AccumulateInherit {
		c.Accumulate = AccumulateDType
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if path := os.Getenv("LOCKSTEP_TABLE"); c.Chooser == nil && path != "" {
		table, err := chooser.Load(path)
		if err != nil {
			return c, fmt.Errorf("collective: configuration of %q: LOCKSTEP_TABLE: %w", c.Name, err)
		}
		c.Chooser = table
	}
	if c.Chooser == nil {
		c.Chooser = chooser.Default()
	}
	source := "Algorithm"
	if c.Algorithm == "" {
		c.Algorithm, source = os.Getenv("LOCKSTEP_ALGORITHM"), "LOCKSTEP_ALGORITHM"
	}
	if _, err := parsePreference(c.Algorithm); err != nil {
		return c, fmt.Errorf("collective: configuration of %q: %s: %w", c.Name, source, err)
	}
	o := Options{Order: c.Order, Accumulate: c.Accumulate}
	if err := o.check(); err != nil {
		return c, fmt.Errorf("collective: configuration of %q: %w", c.Name, err)
	}
	return c, nil
}

// preference is which rows a configuration asks for.
type preference struct {
	all string                // for every operation that it can carry out
	of  [plan.Recv + 1]string // by operation: it must carry it out
}

// parsePreference reads the form of [Config.Algorithm].
func parsePreference(text string) (preference, error) {
	var p preference
	if text == "" {
		return p, nil
	}
	for _, entry := range strings.Split(text, ",") {
		name, row, of := strings.Cut(strings.TrimSpace(entry), ":")
		if !of {
			name, row = "", name
		}
		if _, ok := plan.FindAlgorithm(row); !ok {
			return p, noAlgorithm(row)
		}
		op := AllReduce
		for of && op < Send && op.String() != name {
			op++
		}
		switch {
		case !of:
			p.all = row
		case op == Send:
			return p, fmt.Errorf("%q is no collective operation: want one such as %q", name, AllReduce)
		default:
			p.of[op] = row
		}
	}
	return p, nil
}

// choose returns the row that it asks for, then the table's.
func (f *preference) choose(t *chooser.Table, p Problem, w chooser.Where) (plan.Algorithm, error) {
	if named := f.of[p.Op]; named != "" {
		return chooser.Named(named, p, w)
	}
	if f.all != "" {
		if row, err := chooser.Named(f.all, p, w); err == nil {
			return row, nil
		}
	}
	return t.Choose(p, w)
}

func noAlgorithm(name string) error {
	return fmt.Errorf("no algorithm %q: want one of %s", name, strings.Join(chooser.Names(), ", "))
}

// check returns what is wrong with the options by themselves.
func (o *Options) check() error {
	if o.Order > Any {
		return fmt.Errorf("order %d is none: want Canonical or Any", o.Order)
	}
	if o.Accumulate > AccumulateFloat32 {
		return fmt.Errorf("accumulation type %d is none: want AccumulateDType or AccumulateFloat32", o.Accumulate)
	}
	if o.Algorithm != "" {
		if _, ok := plan.FindAlgorithm(o.Algorithm); !ok {
			return noAlgorithm(o.Algorithm)
		}
	}
	return nil
}

// of returns the options of one call: its own, then the communicator's.
func (c *Config) of(call *Call) Options {
	o := Options{Timeout: c.Timeout, Order: c.Order, Accumulate: c.Accumulate}
	if p := call.Options; p != nil {
		if p.Timeout != 0 {
			o.Timeout = p.Timeout
		}
		if p.Order != OrderInherit {
			o.Order = p.Order
		}
		if p.Accumulate != AccumulateInherit {
			o.Accumulate = p.Accumulate
		}
		if p.Algorithm != "" {
			o.Algorithm = p.Algorithm
		}
	}
	return o
}
