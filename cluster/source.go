package cluster

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/redact"
)

// source is a launcher or description that may identify a process's job.
type source struct {
	name  string // for display
	key   string // for selection
	known string // how it is detected, for display
	depth int    // one of the constants below
	// detect reports whether the source applies to this process.
	detect func(d *Discovery) bool
	// read fills in the job; errors are stored in r.err.
	read func(r *reading, j *Job)
	// hint, which may be nil, is called if the source was not detected; it returns what the user may have
	// overlooked.
	hint func(r *reading) string
}

// The nesting of sources. A deeper source was started inside a less deep one and takes precedence where they
// differ: mpirun in a Slurm allocation. An explicit description is not nested and must agree with all.
const (
	stated           = -1   // a description: the command line, TF_CONFIG
	hosts            = iota // provides hosts: Kubernetes
	allocation              // starts a task on each host: Slurm, operators on Kubernetes
	insideAllocation        // mpirun
	launcher                // lockstep run, torchrun, horovodrun
)

// The names of the sources that the code refers to.
const (
	sourceLockstep = "lockstep run"
	sourceFlags    = "flags"
	noSource       = "none"
)

// sources lists all sources, in order of precedence.
var sources = []source{
	flagsSource, lockstepSource, tfConfigSource, torchrunSource, envSource, horovodSource, openMPISource, pmiSource,
	slurmSource,
	nodeEnvSource, petSource, jaxSource, lwsSource, awsBatchSource, jobSetSource, indexedJobSource,
}

// SourceNames lists the sources that [Discover] queries, in order of precedence, by the names that
// [Discovery.Prefer] and LOCKSTEP_SOURCE accept. The last is "none", a single-process job.
func SourceNames() []string {
	var names []string
	for i := range sources {
		names = append(names, sources[i].key)
	}
	return append(names, noSource)
}

// reading is one source's access to the environment. It records all values that were read.
type reading struct {
	d      *Discovery
	source string
	values []Value
	err    error // the first
}

func (r *reading) fail(format string, args ...any) {
	if r.err == nil {
		r.err = errorf(format, args...)
	}
}

// wrong is fail for an error of this package about one variable.
func (r *reading) wrong(name string, err error) {
	r.fail("%s: %s", name, strings.TrimPrefix(err.Error(), errorf("").Error()))
}

func (r *reading) note(name, value string) { r.values = append(r.values, Value{name, value}) }

// text returns a variable, "" if it is not set.
func (r *reading) text(name string) string {
	value := r.d.env(name)
	if value != "" {
		r.note(name, value)
	}
	return value
}

// number returns a variable that holds a number from 0, or -1 if it is not set or invalid.
func (r *reading) number(name string) int {
	value := r.text(name)
	if value == "" {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(value))
	if err != nil || n < 0 {
		r.fail("%s=%s: want a number from 0", name, strconv.Quote(clip(value)))
		return -1
	}
	return n
}

// need returns the first of several variables that is set; one must be.
func (r *reading) need(names ...string) int {
	for _, name := range names {
		if r.d.env(name) != "" {
			return r.number(name)
		}
	}
	r.fail("%s is not set", strings.Join(names, " or "))
	return -1
}

// workers returns the number of workers from the first of several variables that is set, or else the number
// given separately: it is never guessed.
func (r *reading) workers(names ...string) int {
	for _, name := range names {
		if r.d.env(name) != "" {
			return r.number(name)
		}
	}
	if n := r.d.workersGiven(); n > 0 {
		if r.d.Workers > 0 {
			r.note("--workers", strconv.Itoa(n))
		} else {
			r.note(EnvWorkers, strconv.Itoa(n))
		}
		return n
	}
	text := r.source + " does not contain the number of workers"
	if len(names) > 0 {
		text = strings.Join(names, " or ") + " is not set, so the number of workers is unknown"
	}
	where := EnvWorkers
	if r.source == sourceFlags {
		text, where = "the command line does not contain the number of workers", "--workers or "+where
	}
	r.fail("%s, and it is not guessed: set %s, the same for every worker; %s=%s if each process is a single-process job",
		text, where, EnvSource, noSource)
	return -1
}

// workersGiven returns the number of workers that was given without this process's index; 0: none.
func (d *Discovery) workersGiven() int {
	if d.Workers > 0 && d.Worker < 0 {
		return d.Workers
	}
	if d.env(EnvWorker) != "" {
		return 0
	}
	n, _ := strconv.Atoi(d.env(EnvWorkers)) // which query has checked
	return n
}

// local fills in the index on the host, if both values are set.
func (r *reading) local(j *Job, number, count string) {
	n, of := r.number(number), r.number(count)
	if n >= 0 && of > 0 {
		j.LocalWorker, j.LocalWorkers = n, of
	}
}

// StorePort is the default port of the store: that of torchrun's rendezvous.
const StorePort = 29400

// tcp returns a store's URL.
func tcp(host string, port int) string {
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
}

// storeURL checks a store's URL. Without a scheme it is tcp, without a port it has [StorePort].
func storeURL(text string) (string, error) {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok {
		scheme, rest = "tcp", text
	}
	const want = "want tcp://HOST:PORT, file:///FOLDER or etcd://HOST:PORT,HOST:PORT/PREFIX"
	bad := func(why string) (string, error) {
		return "", fmt.Errorf("%s is not a valid store address: %s: %s", strconv.Quote(clip(redact.URL(text))), why, want)
	}
	switch scheme {
	case "tcp":
		host, port, err := net.SplitHostPort(rest)
		if err != nil {
			host, port = strings.TrimSuffix(strings.TrimPrefix(rest, "["), "]"), strconv.Itoa(StorePort)
		}
		n, err := strconv.Atoi(port)
		if !isHost(host) || err != nil || n < 1 || n > 65535 {
			return bad("host or port is wrong")
		}
		return tcp(host, n), nil
	case "file":
		if !strings.HasPrefix(rest, "/") {
			return bad("the folder must be named from the root")
		}
		return "file://" + rest, nil
	case "etcd", "etcds":
		if strings.HasPrefix(rest, "/") || rest == "" {
			return bad("it names no host")
		}
		return scheme + "://" + rest, nil
	}
	return bad("no store is called " + strconv.Quote(clip(scheme)))
}

// isHost reports whether a text can be a name or an address of a host.
func isHost(s string) bool {
	if strings.Contains(s, ":") {
		_, err := netip.ParseAddr(s)
		return err == nil
	}
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool {
		return c <= ' ' || c == 0x7f || strings.ContainsRune(`[]/\?#@%"<>{}`, c)
	})
}

// fileStore returns a folder's URL.
func fileStore(folder string) string {
	return "file:///" + strings.TrimPrefix(filepath.ToSlash(folder), "/")
}
