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

// Card says who a worker is, to all others.
type Card struct {
	// Job is the job's id; "" is taken for "lockstep". Epoch is the membership of the job, higher after each restart.
	Job   string `json:"job"`
	Epoch uint32 `json:"epoch"`
	// Role tells groups of processes of one job apart that meet by themselves: the agents of a launcher, one on each host,
	// are not workers. It is what errors call them; default "worker".
	Role string `json:"role"`
	// Worker is the process's number, from 0, and Workers how many there are.
	Worker  int `json:"worker"`
	Workers int `json:"workers"`
	// Host and PID are where it runs. Defaults: this process's.
	Host string `json:"host"`
	PID  int    `json:"pid"`
	// Replicas is how many replicas it has.
	Replicas int `json:"replicas,omitempty"`
	// Build is the program's version, for people.
	Build string `json:"build,omitempty"`
	// Nonce tells this process from any other that says that it is the same worker. Default: random.
	Nonce string `json:"nonce"`
	// Data is for those who build on this: the addresses of the worker, say. At most 1 MiB.
	Data []byte `json:"data,omitempty"`
}

const (
	jobDefault  = "lockstep"
	roleDefault = "worker"
	jobMax      = 200     // bytes, escaped
	workersMax  = 1 << 16 // of a job
	dataMax     = 1 << 20 // bytes of Card.Data
)

// Key returns the key of something that belongs to an epoch of a job: "<job>/<epoch>/<part>/<part>…". The job is escaped, so that no
// job's name is the beginning of another's keys.
func Key(job string, epoch uint32, parts ...string) string {
	return jobKey(job) + strconv.FormatUint(uint64(epoch), 10) + "/" + strings.Join(parts, "/")
}

// Key returns a key of the card's job and epoch.
func (c *Card) Key(parts ...string) string { return Key(c.Job, c.Epoch, parts...) }

// String says who it is: "worker 3 (host a, pid 17)".
func (c *Card) String() string {
	return fmt.Sprintf("%s %d (host %s, pid %d)", c.Role, c.Worker, c.Host, c.PID)
}

// jobKey is what all keys of a job begin with.
func jobKey(job string) string {
	if job == "" {
		job = jobDefault
	}
	return url.QueryEscape(job) + "/"
}

// check returns what is wrong with a card, whoever wrote it.
func (c *Card) check() error {
	switch {
	case len(jobKey(c.Job)) > jobMax:
		return fmt.Errorf("rendezvous: the job's id %.40q… has %d bytes, escaped; want at most %d", c.Job, len(jobKey(c.Job)), jobMax)
	case c.Workers < 1 || c.Workers > workersMax:
		return fmt.Errorf("rendezvous: a job of %d %ss, want 1 to %d", c.Workers, c.Role, workersMax)
	case c.Worker < 0:
		return fmt.Errorf("rendezvous: %s %d, want a number from 0 on", c.Role, c.Worker)
	case len(c.Data) > dataMax:
		return fmt.Errorf("rendezvous: %s %d's card has %d bytes of data, want at most %d", c.Role, c.Worker, len(c.Data), dataMax)
	case c.Role == "" || len(c.Role) > 32 || strings.Contains(c.Role, "/"):
		return fmt.Errorf("rendezvous: role %q, want a word", c.Role)
	}
	return nil
}

// filled returns c with its defaults.
func (c Card) filled() (Card, error) {
	if c.Job == "" {
		c.Job = jobDefault
	}
	if c.Role == "" {
		c.Role = roleDefault
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
	return c, c.check()
}

// hostName returns this host's name, for people.
func hostName() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "unknown"
	}
	return name
}

// parseCard reads a card.
func parseCard(text []byte) (Card, error) {
	var c Card
	if err := json.Unmarshal(text, &c); err != nil {
		return c, fmt.Errorf("rendezvous: a card that is none: %w", err)
	}
	return c, c.check()
}
