package rendezvous

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
)

// Registration is what a worker publishes about itself to all others.
type Registration struct {
	// Job is the job's id; "" means "lockstep". Epoch counts the job's restarts: each restart has a higher
	// one.
	Job   string `json:"job"`
	Epoch uint32 `json:"epoch"`
	// Worker is the process's number, from 0, and Workers the number of workers.
	Worker  int `json:"worker"`
	Workers int `json:"workers"`
	// Host and PID identify the process. Defaults: this process's.
	Host string `json:"host"`
	PID  int    `json:"pid"`
	// Addr is the address at which the other workers reach it: "host:port"; "": none.
	Addr string `json:"addr,omitempty"`
	// Replicas is the worker's number of replicas.
	Replicas int `json:"replicas,omitempty"`
	// Build is the program's version, for display.
	Build string `json:"build,omitempty"`
	// Nonce distinguishes this process from others that register as the same worker. Default: random. [Join] returns
	// that of this process, and of the first worker of each group of workers whose registrations are equal otherwise.
	Nonce string `json:"nonce"`
	// Version is the version of the rendezvous. [Join] sets it.
	Version int `json:"version,omitempty"`
	// Data is for packages built on this one. At most 1 MiB. A job sends fewer bytes if it is equal for the workers of a
	// host.
	Data []byte `json:"data,omitempty"`
}

const (
	jobDefault = "lockstep"
	jobMax     = 200     // bytes, escaped
	workersMax = 1 << 16 // per job
	dataMax    = 1 << 20 // bytes of Registration.Data
)

// Key returns a key in an epoch of a job: "<job>/<epoch>/<part>/<part>…". The job is escaped, so that no
// job's name is a prefix of another job's keys.
func Key(job string, epoch uint32, parts ...string) string {
	return jobKey(job) + strconv.FormatUint(uint64(epoch), 10) + "/" + strings.Join(parts, "/")
}

// JobKey returns a key of a job that belongs to no epoch: "<job>/<name>". No name is a number.
func JobKey(job, name string) string { return jobKey(job) + name }

// Key returns a key in the registration's job and epoch.
func (c *Registration) Key(parts ...string) string { return Key(c.Job, c.Epoch, parts...) }

// String identifies the process: "worker 3 (host a, pid 17)".
func (c *Registration) String() string {
	return fmt.Sprintf("worker %d (host %s, pid %d)", c.Worker, c.Host, c.PID)
}

// jobKey returns the prefix of all keys of a job.
func jobKey(job string) string {
	if job == "" {
		job = jobDefault
	}
	return url.QueryEscape(job) + "/"
}

// check returns an error for a registration that is invalid, whichever process wrote it.
func (c *Registration) check() error {
	switch {
	case len(jobKey(c.Job)) > jobMax:
		return fmt.Errorf("rendezvous: the job's id %.40q… has %d bytes, escaped; want at most %d", c.Job,
			len(jobKey(c.Job)), jobMax)
	case c.Workers < 1 || c.Workers > workersMax:
		return fmt.Errorf("rendezvous: a job of %d workers, want 1 to %d", c.Workers, workersMax)
	case c.Worker < 0:
		return fmt.Errorf("rendezvous: worker %d, want a number from 0 on", c.Worker)
	case len(c.Data) > dataMax:
		return fmt.Errorf("rendezvous: the registration of worker %d has %d bytes of data, want at most %d", c.Worker,
			len(c.Data), dataMax)
	}
	return nil
}

// filled returns c with its defaults.
func (c Registration) filled() (Registration, error) {
	if c.Job == "" {
		c.Job = jobDefault
	}
	if c.Host == "" {
		c.Host = hostName()
	}
	if c.PID == 0 {
		c.PID = os.Getpid()
	}
	if c.Nonce == "" {
		c.Nonce = rand.Text()
	}
	c.Version = Version
	return c, c.check()
}

// hostName returns this host's name, for display.
func hostName() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "unknown"
	}
	return name
}

// parseRegistration decodes a registration.
func parseRegistration(text []byte) (Registration, error) {
	var c Registration
	if err := json.Unmarshal(text, &c); err != nil {
		return c, fmt.Errorf("rendezvous: invalid registration: %w", err)
	}
	return c, c.check()
}
