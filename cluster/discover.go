package cluster

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/private"
)

// Discovery configures [Discover]. The zero value reads this process's environment.
type Discovery struct {
	// Values from the command line. Workers is the number of workers, and Worker the index of this process.
	// Workers of 0 or less is not given. A negative Worker leaves the index to another source: then Workers
	// only completes a source that does not have the number. Store and ID replace the source's values, if
	// they are not empty; a Store without a scheme is tcp.
	Worker, Workers int
	Store, ID       string

	// Prefer restricts the search to one source ("slurm", or "Slurm"; [SourceNames] lists them; "none" for
	// a single-process job). Default: LOCKSTEP_SOURCE, and without that all sources.
	Prefer string

	Getenv   func(string) (string, bool)  // default os.LookupEnv
	ReadFile func(string) ([]byte, error) // default [ReadFile]; /etc/hosts in a pod, and /proc/PID/stat
	Hostname func() (string, error)       // default os.Hostname
	PID      int                          // default os.Getpid
	Folder   string                       // for the stores of single-host jobs; default [private.Path]
}

func (d Discovery) withDefaults() *Discovery {
	if d.Getenv == nil {
		d.Getenv = os.LookupEnv
	}
	if d.ReadFile == nil {
		d.ReadFile = ReadFile
	}
	if d.Hostname == nil {
		d.Hostname = os.Hostname
	}
	if d.PID == 0 {
		d.PID = os.Getpid()
	}
	if d.Folder == "" {
		d.Folder = private.Path()
	}
	if d.Prefer == "" {
		d.Prefer = d.env(EnvSource)
	}
	return &d
}

// fileMax bounds the files that ReadFile reads: a bundle of certificate authorities has a few hundred KiB, the cluster
// of 65,536 workers 2 MiB.
const fileMax = 4 << 20

// ReadFile is [os.ReadFile] for a file that configures a job: a secret, a key, certificates, a cluster, or a file of
// the system. A file of more than 4 MiB, or without an end, such as /dev/zero, is an error.
func ReadFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, fileMax+1))
	if err == nil && len(text) > fileMax {
		return nil, fmt.Errorf("%s has more than %d bytes: want a secret, a key, certificates, a cluster or a file of the "+
			"system", name, fileMax)
	}
	return text, err
}

// env returns an environment variable; an empty variable counts as not set.
func (d *Discovery) env(name string) string {
	value, _ := d.Getenv(name)
	return value
}

// Discover determines which job this process is a worker of. It queries every source in the order of
// [SourceNames], and selects the first that applies. All others must agree with it on the worker's index and
// on the number of workers, except for sources that the selected one was started inside of: mpirun in a Slurm
// allocation, lockstep run under mpirun. Nothing is guessed: a source without the number of workers must be
// completed (LOCKSTEP_WORKERS), and without any source the process is a single-process job.
//
// Errors match [ErrInvalid]. They name the invalid variable, or the values in which the sources disagree, and
// the remedy.
func Discover(cfg Discovery) (*Job, error) {
	d := cfg.withDefaults()
	found, err := d.query()
	if err != nil {
		return nil, err
	}
	job, err := d.combine(found)
	if err != nil {
		return nil, err
	}
	if err := d.override(job); err != nil {
		return nil, err
	}
	job.finish()
	return job, nil
}

// answer is the result of one source.
type answer struct {
	source *source
	job    *Job // nil: only the hint
	err    error
	hint   string
}

// query queries all sources, or the preferred one.
func (d *Discovery) query() ([]answer, error) {
	if strings.EqualFold(d.Prefer, noSource) {
		return nil, nil
	}
	if text := d.env(EnvWorkers); text != "" {
		if n, err := strconv.Atoi(text); err != nil || n < 1 {
			return nil, errorf("%s=%s: want a number from 1", EnvWorkers, strconv.Quote(clip(text)))
		}
	}
	if d.Prefer != "" {
		return d.askOnly()
	}
	var out []answer
	for i := range sources {
		if a := sources[i].query(d); a != nil {
			out = append(out, *a)
		}
	}
	return out, nil
}

func (d *Discovery) askOnly() ([]answer, error) {
	for i := range sources {
		s := &sources[i]
		if !strings.EqualFold(d.Prefer, s.key) && !strings.EqualFold(d.Prefer, s.name) {
			continue
		}
		a := s.query(d)
		if a == nil || a.job == nil && a.err == nil {
			return nil, errorf("%s was requested, but does not describe this process: it is detected by %s", s.name, s.known)
		}
		return []answer{*a}, nil
	}
	return nil, errorf("no source is called %q: there are %s", clip(d.Prefer), strings.Join(SourceNames(), ", "))
}

// query returns the source's answer, or nil if it does not apply to this process.
func (s *source) query(d *Discovery) *answer {
	r := &reading{d: d, source: s.name}
	if !s.detect(d) {
		if s.hint == nil {
			return nil
		}
		if hint := s.hint(r); hint != "" {
			return &answer{source: s, hint: hint}
		}
		return nil
	}
	job := &Job{Source: s.name, LocalWorker: -1, Task: NoTask}
	s.read(r, job)
	job.Values = r.values
	if r.err == nil {
		r.err = job.inRange()
	}
	if r.err != nil {
		return &answer{source: s, err: fmt.Errorf("%w\n  read by %s: %s", r.err, s.name, valuesText(r.values))}
	}
	return &answer{source: s, job: job}
}

// combine combines all answers into one job.
func (d *Discovery) combine(all []answer) (*Job, error) {
	var won *answer
	var job *Job
	var hints []Claim
	for i := range all {
		a := &all[i]
		switch {
		case a.hint != "":
			hints = append(hints, Claim{Source: a.source.name, Worker: -1, Note: a.hint})
		case won == nil && a.err != nil:
			return nil, a.err
		case won == nil:
			won, job = a, a.job
		case a.err != nil:
			job.Beside = append(job.Beside, Claim{Source: a.source.name, Worker: -1, Note: "is incomplete and was not queried"})
		default:
			claim, err := won.compare(a)
			if err != nil {
				return nil, err
			}
			job.Beside = append(job.Beside, claim)
		}
	}
	if job == nil {
		if n := d.workersGiven(); n > 1 && !strings.EqualFold(d.Prefer, noSource) {
			return nil, errorf("%d workers were requested, but no source has the number of this process: give it (%s), or "+
				"start the workers "+
				"by lockstep run, srun, mpirun or torchrun", n, EnvWorker)
		}
		job = &Job{Source: noSource, Workers: 1, LocalWorker: -1, Task: NoTask, Beside: hints}
	} else if n := d.workersGiven(); n > 0 && n != job.Workers && job.Task.Type != Evaluator {
		return nil, errorf("%s has %d workers, but %d were given by %s or the command line: correct one of them", job.Source,
			job.Workers, n, EnvWorkers)
	}
	return job, nil
}

// compare compares another source's answer with the selected one's, adds values that the selected one lacks,
// and returns how they relate.
func (a *answer) compare(b *answer) (Claim, error) {
	w, o := a.job, b.job
	claim := Claim{Source: b.source.name, Worker: o.Worker, Workers: o.Workers, Values: o.Values}
	lone := o.Workers == 1 && b.source.depth <= insideAllocation && b.source.depth != stated
	switch {
	case w.Task.Type == Evaluator || o.Task.Type == Evaluator:
		claim.Note = "an evaluator is not a worker, so they need not agree"
	case w.Worker == o.Worker && w.Workers == o.Workers:
		claim.Note = "agrees"
		// An outer source may agree by chance with some of the workers only, and so adds nothing.
		if a.source.depth == stated || b.source.depth == stated || a.source.depth == b.source.depth {
			claim.Note += w.complete(o)
		}
	case a.source.depth != stated && b.source.depth != stated && a.source.depth > b.source.depth:
		claim.Note = a.source.name + " was started inside it"
	case lone:
		claim.Note = "a single task, in which anything may be started"
	default:
		return claim, errorf("two sources disagree about this process, and neither was started inside the other:\n"+
			"  %s: worker %d of %d  (%s)\n  %s: worker %d of %d  (%s)\n"+
			"remove the variables of the one that is wrong, or select one: %s=%s or %s=%s",
			a.source.name, w.Worker, w.Workers, valuesText(w.Values), b.source.name, o.Worker, o.Workers, valuesText(o.Values),
			EnvSource, a.source.key, EnvSource, b.source.key)
	}
	return claim, nil
}

// complete adds the values of an agreeing source that this one lacks.
func (j *Job) complete(from *Job) string {
	var took []string
	if j.Store == "" && from.Store != "" {
		j.Store, j.Hosted = from.Store, from.Hosted
		took = append(took, "the rendezvous store")
	}
	if j.ID == "" && from.ID != "" {
		j.ID = from.ID
		took = append(took, "the job's name")
	}
	if j.LocalWorkers == 0 && from.LocalWorkers > 0 && from.LocalWorker >= 0 {
		j.LocalWorker, j.LocalWorkers = from.LocalWorker, from.LocalWorkers
		took = append(took, "the position on the host")
	}
	if len(took) == 0 {
		return ""
	}
	return ", and provides " + strings.Join(took, ", ")
}

// override applies the values that were given for all sources: a store, and the job's name.
func (d *Discovery) override(j *Job) error {
	own := j.Source == sourceLockstep
	if store := d.env(EnvStore); store != "" && !own {
		if err := j.setStore(EnvStore, store); err != nil {
			return err
		}
	}
	if d.Store != "" {
		if err := j.setStore("the command line", d.Store); err != nil {
			return err
		}
	}
	if id := d.env(EnvJob); id != "" && !own {
		j.ID = id
		j.Values = append(j.Values, Value{EnvJob, id})
	}
	if d.ID != "" {
		j.ID = d.ID
		j.Values = append(j.Values, Value{"--rdzv-id", d.ID})
	}
	for _, name := range []string{EnvSecret, EnvSecretFile} {
		if d.env(name) != "" {
			j.Values = append(j.Values, Value{name, hidden})
		}
	}
	return nil
}

// setStore sets a store that was given separately from the source.
func (j *Job) setStore(by, store string) error {
	url, err := storeURL(store)
	if err != nil {
		return errorf("%s: %w", by, err)
	}
	if by == EnvStore {
		j.Values = append(j.Values, Value{EnvStore, url})
	} else {
		j.Values = append(j.Values, Value{"--rdzv-endpoint", url})
	}
	j.Store, j.NoStore = url, ""
	j.Hosted = !strings.HasPrefix(url, "tcp:") // a folder and etcd need no worker to serve them
	return nil
}

// finish validates the whole job, and builds a spec if the source has none.
func (j *Job) finish() {
	if j.Workers == 1 && j.Source != sourceLockstep && !j.storeGiven() {
		j.Store, j.Hosted, j.NoStore = "", false, "" // a single worker needs no store
	}
	if j.Store != "" {
		j.NoStore = ""
	}
	if j.Spec == nil {
		j.Spec = Spec{}
		if j.Workers > 1 {
			j.makeSpec()
		}
	}
}

func (j *Job) storeGiven() bool {
	for _, v := range j.Values {
		if v.Name == EnvStore || v.Name == "--rdzv-endpoint" {
			return true
		}
	}
	return false
}

// makeSpec builds a spec of workers only, of which at most worker 0's address is known.
func (j *Job) makeSpec() {
	tasks := make(map[int]string, j.Workers)
	for i := range j.Workers {
		tasks[i] = ""
	}
	if address, ok := strings.CutPrefix(j.Store, "tcp://"); ok && !j.Hosted {
		tasks[0] = address
	}
	j.Spec, j.Task = Spec{Worker: tasks}, Task{Type: Worker, Index: j.Worker}
}

// inRange returns an error if the numbers cannot be a job's.
func (j *Job) inRange() error {
	switch {
	case j.Workers < 1 || j.Workers > hostsMax:
		return errorf("%s has %d workers: want 1 to %d", j.Source, j.Workers, hostsMax)
	case j.Worker < 0 || j.Worker >= j.Workers:
		return errorf("%s numbers this process worker %d of %d: want 0 to %d", j.Source, j.Worker, j.Workers, j.Workers-1)
	case j.LocalWorkers > 0 && (j.LocalWorker < 0 || j.LocalWorker >= j.LocalWorkers):
		return errorf("%s numbers this process worker %d of %d on this host: want 0 to %d", j.Source, j.LocalWorker,
			j.LocalWorkers, j.LocalWorkers-1)
	case j.LocalWorkers > j.Workers:
		return errorf("%s has %d of %d workers on this host", j.Source, j.LocalWorkers, j.Workers)
	}
	return nil
}
