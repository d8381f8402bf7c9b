package collective

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/timeline"
)

// Config configures a communicator. The zero value works. All fields but Timeout, Stall, Monitor, Describe,
// Timeline and Logger must be equal on all ranks; if ranks choose different algorithms, the call is a mismatch.
type Config struct {
	// Name of the communicator in errors and logs. Default "world".
	Name string
	// Epoch is the epoch of the job, at first: each [Group.Rebuild] increases it. Calls of different epochs are
	// never matched.
	Epoch uint32
	// Timeout bounds how long one call waits for its peers. Default 10 minutes; negative: no limit, which is
	// logged once.
	Timeout time.Duration
	// Stall is how long a call waits before it logs, once, which ranks it waits for. Default 30 seconds;
	// negative: never.
	Stall time.Duration
	// Order and Accumulate are the defaults of the calls' [Options]. Default Canonical and AccumulateDType.
	Order      Order
	Accumulate Accumulate
	// Algorithm names one of [plan.Algorithms], for the calls that name none themselves: "name" for all calls
	// that it can execute, or "operation:name,operation:name", as in "all_reduce:direct". Default: the
	// environment variable LOCKSTEP_ALGORITHM, in the same form; if that is not set, the chooser decides.
	Algorithm string
	// Chooser is the table from which algorithms are chosen. Default: the table that the environment variable
	// LOCKSTEP_TABLE names, else [chooser.Default].
	Chooser *chooser.Table
	// Monitor watches the calls. Default none.
	Monitor Monitor
	// Describe returns which workers a failure concerns, and their last reported state: [Error.Who]. The
	// first local rank that detects a failure, or is notified of one, calls it while all other local ranks
	// wait for it, so it must return within a few seconds in every case. If it takes at most a tenth of a
	// second, the ranks of other processes receive its result with the failure; otherwise they are notified
	// of the failure at once, and describe it themselves. The argument is the failure, in this communicator's
	// ranks: the failed ranks are its Peers or, if another process reported the failure, its Rank. Default
	// none.
	Describe func(*Error) string
	// Timeline records every call of the local ranks, from its entry to its end. Default none. Reading the clock twice
	// costs about 0.1 µs a call.
	Timeline *timeline.Recorder
	// Logger receives the warnings. Default slog.Default().
	Logger *slog.Logger
}

const (
	defaultTimeout = 10 * time.Minute
	defaultStall   = 30 * time.Second
)

// filled returns c with its defaults filled in, or what is invalid.
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

// preference is the algorithms that a configuration asks for.
type preference struct {
	all string                // for every operation that it can execute
	of  [plan.Recv + 1]string // by operation: the algorithm must be able to execute it
}

// parsePreference parses the form of [Config.Algorithm].
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
		if _, err := chooser.Find(row); err != nil {
			return p, err
		}
		op, err := plan.ParseOp(name)
		switch {
		case !of:
			p.all = row
		case err != nil || op >= Send:
			return p, fmt.Errorf("%q is not a collective operation: want one such as %q", name, AllReduce)
		default:
			p.of[op] = row
		}
	}
	return p, nil
}

// choose returns the preferred algorithm, or else the table's choice.
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

// options sets o to the options of one call: those of the call, then the communicator's. It sets each field in place:
// a copy of a struct that was just made field by field stalls the processor.
func (c *Config) options(o *Options, call *Call) {
	o.Timeout, o.Order, o.Accumulate, o.Algorithm = c.Timeout, c.Order, c.Accumulate, ""
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
}
