package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
)

// scene makes a discovery of a text: "NAME=value" is the environment, "flag worker=1 workers=2 store=… id=… prefer=…"
// the command line, "hostname H", "pid N" and "file PATH text" the machine.
func scene(t testing.TB, text string) Discovery {
	t.Helper()
	environment, files := map[string]string{}, map[string]string{}
	d := Discovery{Worker: -1, Workers: -1, PID: 1, Folder: "/tmp/lockstep-1000", Getenv: env(environment)}
	host := "host"
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		word, rest, _ := strings.Cut(line, " ")
		var err error
		switch word {
		case "flag":
			err = sceneFlags(&d, rest)
		case "hostname":
			host = rest
		case "pid":
			d.PID, err = strconv.Atoi(rest)
		case "file":
			name, content, _ := strings.Cut(rest, " ")
			files[name] = content
		default:
			name, value, ok := strings.Cut(line, "=")
			if !ok {
				err = errors.New("no NAME=value")
			}
			environment[name] = value
		}
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	}
	d.Hostname = func() (string, error) { return host, nil }
	d.ReadFile = func(name string) ([]byte, error) {
		if text, ok := files[name]; ok {
			return []byte(text + "\n"), nil
		}
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return d
}

// TestReadFile checks that a file that is too long, or has no end, is an error.
func TestReadFile(t *testing.T) {
	read := Discovery{}.withDefaults().ReadFile
	path := filepath.Join(t.TempDir(), "hosts")
	for _, n := range []int{0, 20, fileMax, fileMax + 1} {
		if err := os.WriteFile(path, make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
		text, err := read(path)
		if tooLong := n > fileMax; tooLong != (err != nil) || !tooLong && len(text) != n {
			t.Errorf("a file of %d bytes: %d bytes, %v", n, len(text), err)
		}
	}
	if _, err := read(path + "s"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if runtime.GOOS != "windows" {
		if _, err := read("/dev/zero"); err == nil || !strings.Contains(err.Error(), "has more than") {
			t.Errorf("a file without an end: %v", err)
		}
	}
}

func sceneFlags(d *Discovery, text string) (err error) {
	for _, field := range strings.Fields(text) {
		name, value, _ := strings.Cut(field, "=")
		switch name {
		case "worker":
			d.Worker, err = strconv.Atoi(value)
		case "workers":
			d.Workers, err = strconv.Atoi(value)
		case "store":
			d.Store = value
		case "id":
			d.ID = value
		case "prefer":
			d.Prefer = value
		default:
			err = errors.New("no such flag")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// TestDiscover compares the result for every environment of testdata/discover, as the user reads it, with the recorded
// one. LOCKSTEP_UPDATE=1 records the results.
func TestDiscover(t *testing.T) {
	names, err := filepath.Glob("testdata/discover/*.txtar")
	if err != nil || len(names) == 0 {
		t.Fatalf("%v, %v", names, err)
	}
	asked := map[string]bool{}
	for _, name := range names {
		archive, err := txtar.ParseFile(name)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		var cases []txtar.File
		for _, f := range archive.Files {
			if of, ok := strings.CutSuffix(f.Name, " =>"); ok {
				want[of] = string(f.Data)
			} else {
				cases = append(cases, f)
			}
		}
		var updated []txtar.File
		for _, f := range cases {
			t.Run(filepath.Base(name)+"/"+f.Name, func(t *testing.T) {
				got := discovered(t, string(f.Data), asked)
				updated = append(updated, f, txtar.File{Name: f.Name + " =>", Data: []byte(got)})
				if got != want[f.Name] && os.Getenv("LOCKSTEP_UPDATE") == "" {
					t.Errorf("%s\ngot\n%s\nwant\n%s", f.Data, got, want[f.Name])
				}
				if strings.Contains(got, "hunter2") || strings.Contains(got, "c2VjcmV0") {
					t.Errorf("a secret is printed:\n%s", got)
				}
			})
		}
		if os.Getenv("LOCKSTEP_UPDATE") != "" {
			archive.Files = updated
			if err := os.WriteFile(name, txtar.Format(archive), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range sources {
		if !asked[sources[i].name] {
			t.Errorf("no case of testdata/discover selects %s", sources[i].name)
		}
	}
}

// discovered returns what the user reads about a scene, followed by the other contents of the job.
func discovered(t *testing.T, text string, asked map[string]bool) string {
	job, err := Discover(scene(t, text))
	if err != nil {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%v does not match ErrInvalid", err)
		}
		return "error: " + err.Error() + "\n"
	}
	asked[job.Source] = true
	out := job.Describe()
	spec, _ := job.Spec.MarshalJSON()
	if len(job.Spec) > 0 {
		out += fmt.Sprintf("%v of %s\n", job.Task, spec)
	}
	return out
}

// world is the environment of one worker as a launcher sets it.
type world struct {
	name string
	set  func(e map[string]string, worker, workers int)
}

var worlds = []world{
	{"lockstep", func(e map[string]string, w, n int) {
		set(e, "LOCKSTEP_WORKER", w, "LOCKSTEP_WORKERS", n, "LOCKSTEP_STORE", "tcp://n0:1")
	}},
	{"tf_config", func(e map[string]string, w, n int) {
		text, _ := NewSpec(map[string][]string{"worker": slices.Repeat([]string{"h:1"}, n)}).MarshalJSON()
		set(e, "TF_CONFIG", fmt.Sprintf(`{"cluster":%s,"task":{"type":"worker","index":%d}}`, text, w))
	}},
	{"torchrun", func(e map[string]string, w, n int) {
		set(e, "TORCHELASTIC_RUN_ID", "x", "RANK", w, "WORLD_SIZE", n, "MASTER_ADDR", "h", "MASTER_PORT", 5)
	}},
	{"env", func(e map[string]string, w, n int) {
		set(e, "RANK", w, "WORLD_SIZE", n, "LOCAL_RANK", 0, "MASTER_ADDR", "h", "MASTER_PORT", 5)
	}},
	{"horovod", func(e map[string]string, w, n int) { set(e, "HOROVOD_RANK", w, "HOROVOD_SIZE", n) }},
	{"openmpi", func(e map[string]string, w, n int) { set(e, "OMPI_COMM_WORLD_RANK", w, "OMPI_COMM_WORLD_SIZE", n) }},
	{"pmi", func(e map[string]string, w, n int) { set(e, "PMI_RANK", w, "PMI_SIZE", n) }},
	{"slurm", func(e map[string]string, w, n int) {
		set(e, "SLURM_JOB_ID", 9, "SLURM_PROCID", w, "SLURM_STEP_NUM_TASKS", n, "SLURM_STEP_NODELIST", "n[1-4]")
	}},
	{"env-hosts", func(e map[string]string, w, n int) {
		set(e, "RANK", w, "WORLD_SIZE", n, "MASTER_ADDR", "h", "MASTER_PORT", 5)
	}},
	{"kubeflow", func(e map[string]string, w, n int) { set(e, "PET_NODE_RANK", w, "PET_NNODES", n) }},
	{"jax", func(e map[string]string, w, n int) { set(e, "JAX_PROCESS_ID", w, "JAX_NUM_PROCESSES", n) }},
	{"lws", func(e map[string]string, w, n int) {
		set(e, "LWS_LEADER_ADDRESS", "h", "LWS_WORKER_INDEX", w, "LWS_GROUP_SIZE", n)
	}},
	{"aws-batch", func(e map[string]string, w, n int) {
		set(e, "AWS_BATCH_JOB_NODE_INDEX", w, "AWS_BATCH_JOB_NUM_NODES", n)
	}},
}

func set(e map[string]string, pairs ...any) {
	for i := 0; i < len(pairs); i += 2 {
		e[pairs[i].(string)] = fmt.Sprint(pairs[i+1])
	}
}

// nested lists which world may be started inside which, with other numbers. It is written by hand, for the combinations
// that occur.
var nested = map[string][]string{
	"lockstep":  {"openmpi", "pmi", "slurm", "env-hosts", "kubeflow", "jax", "lws", "aws-batch"},
	"torchrun":  {"openmpi", "pmi", "slurm", "kubeflow", "jax", "lws", "aws-batch"},
	"env":       {"openmpi", "pmi", "slurm", "kubeflow", "jax", "lws", "aws-batch"},
	"horovod":   {"openmpi", "pmi", "slurm", "env-hosts", "kubeflow", "jax", "lws", "aws-batch"},
	"openmpi":   {"slurm", "env-hosts", "kubeflow", "jax", "lws", "aws-batch"},
	"pmi":       {"slurm", "env-hosts", "kubeflow", "jax", "lws", "aws-batch"},
	"tf_config": nil, "slurm": nil, "env-hosts": nil, "kubeflow": nil, "jax": nil, "lws": nil, "aws-batch": nil,
}

// TestEveryPairOfSources sets two worlds at once. If they agree, the job is that of both. If not, the one that can have
// been started inside the other is selected; if neither can, the error names both, with their numbers.
func TestEveryPairOfSources(t *testing.T) {
	for i, a := range worlds {
		for _, b := range worlds[i+1:] {
			if slices.Contains([]string{"torchrun", "env", "env-hosts"}, a.name) &&
				slices.Contains([]string{"env", "env-hosts"}, b.name) {
				continue // they use the same names
			}
			for _, test := range []struct{ aw, an, bw, bn int }{{1, 4, 1, 4}, {1, 4, 2, 4}, {1, 4, 1, 3}, {1, 4, 0, 2}} {
				e := map[string]string{}
				a.set(e, test.aw, test.an)
				b.set(e, test.bw, test.bn)
				job, err := Discover(Discovery{Getenv: env(e)})
				agree := test.aw == test.bw && test.an == test.bn
				inside := slices.Contains(nested[a.name], b.name)
				switch {
				case agree || inside:
					if err != nil || job.Worker != test.aw || job.Workers != test.an {
						t.Errorf("%s %d of %d with %s %d of %d: %v, %v", a.name, test.aw, test.an, b.name, test.bw, test.bn, job, err)
					} else if !strings.Contains(job.Describe(), "also found") {
						t.Errorf("%s with %s: the second is not reported:\n%s", a.name, b.name, job.Describe())
					}
				case err == nil:
					t.Errorf("%s %d of %d with %s %d of %d: selected %v, want an error", a.name, test.aw, test.an, b.name, test.bw,
						test.bn, job)
				default:
					for _, part := range []string{
						fmt.Sprintf("worker %d of %d", test.aw, test.an), fmt.Sprintf("worker %d of %d", test.bw, test.bn),
						EnvSource + "=" + a.name, EnvSource + "=" + b.name,
					} {
						if !strings.Contains(err.Error(), part) {
							t.Errorf("%s with %s: %v does not contain %q", a.name, b.name, err, part)
						}
					}
					for _, prefer := range []world{a, b} {
						e[EnvSource] = prefer.name
						if _, err := Discover(Discovery{Getenv: env(e)}); err != nil {
							t.Errorf("%s with %s, and %s preferred: %v", a.name, b.name, prefer.name, err)
						}
					}
				}
			}
		}
	}
}

// TestWorkersOfAJobFitTogether discovers every worker of jobs of several sizes: they have all numbers, one chief, and
// one store.
func TestWorkersOfAJobFitTogether(t *testing.T) {
	for _, w := range worlds {
		for _, n := range []int{1, 2, 5} {
			var numbers []int
			stores := map[string]bool{}
			for worker := range n {
				e := map[string]string{}
				w.set(e, worker, n)
				job, err := Discover(Discovery{Getenv: env(e), Hostname: func() (string, error) { return "h", nil }})
				if err != nil {
					t.Fatalf("%s: %v", w.name, err)
				}
				numbers = append(numbers, job.Worker)
				stores[job.Store] = true
				if job.Chief() != (worker == 0) {
					t.Errorf("%s, worker %d: chief %v", w.name, worker, job.Chief())
				}
				if n > 1 && (job.Store == "") == (job.NoStore == "") {
					t.Errorf("%s, worker %d: store %q, and why there is none: %q", w.name, worker, job.Store, job.NoStore)
				}
				checkResolver(t, job)
			}
			if want := slices.Sorted(slices.Values(numbers)); len(numbers) != n || want[0] != 0 || want[n-1] != n-1 {
				t.Errorf("%s: workers %v of %d", w.name, numbers, n)
			}
			if len(stores) != 1 && w.name != "aws-batch" { // only the other nodes get the main node's address
				t.Errorf("%s: the workers have the stores %v", w.name, slices.Sorted(maps.Keys(stores)))
			}
		}
	}
}

// TestMpirunInSlurm checks that the workers that mpirun starts through srun on other hosts are tasks of a step, that
// those on its own host are not, and that all have one store.
func TestMpirunInSlurm(t *testing.T) {
	for _, each := range []int{1, 2} {
		stores := map[string]bool{}
		for rank := range 3 * each {
			e := map[string]string{}
			set(e, "OMPI_COMM_WORLD_RANK", rank, "OMPI_COMM_WORLD_SIZE", 3*each, "SLURM_JOB_ID", 4711, "SLURM_JOB_NODELIST",
				"n[1-3]", "SLURM_PROCID", 0)
			if host := rank / each; host > 0 {
				set(e, "SLURM_STEP_ID", 5, "SLURM_STEP_NODELIST", "n[2-3]", "SLURM_STEP_NUM_TASKS", 2, "SLURM_PROCID", host-1)
			}
			job, err := Discover(Discovery{Getenv: env(e)})
			if err != nil || job.Worker != rank || job.Workers != 3*each || job.Store == "" {
				t.Fatalf("rank %d: %v, %v", rank, job, err)
			}
			stores[job.Store] = true
		}
		if len(stores) != 1 {
			t.Errorf("%d on each host: they have the stores %v", each, slices.Sorted(maps.Keys(stores)))
		}
	}
}

// checkResolver compares the answers that a strategy needs with the job.
func checkResolver(t *testing.T, job *Job) {
	t.Helper()
	r := job.Resolver()
	spec, err1 := r.Spec()
	task, err2 := r.Task()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if task.Type == Evaluator {
		return // it need not be in the spec
	}
	if len(spec) == 0 {
		if job.Workers != 1 {
			t.Errorf("%v has no spec", job)
		}
		return
	}
	id, err1 := IDInCluster(spec, task)
	workers, err2 := WorkerCount(spec, task.Type)
	if err := errors.Join(err1, err2); err != nil || id != job.Worker || workers != job.Workers {
		t.Errorf("%v: the resolver has %d of %d, %v", job, id, workers, err)
	}
}

// TestValuesHideSecrets checks that secrets are hidden, by name and as passwords of addresses.
func TestValuesHideSecrets(t *testing.T) {
	for _, name := range []string{"LOCKSTEP_SECRET", "MY_TOKEN", "aws_access_key_id", "DB_PASSWORD", "PASSWD"} {
		if s := (Value{name, "hunter2"}).String(); strings.Contains(s, "hunter2") || !strings.HasPrefix(s, name+"=") {
			t.Errorf("%s", s)
		}
	}
	for _, value := range []string{"etcd://root:hunter2@h:1/x", "tcp://hunter2@h:1"} {
		if s := (Value{"STORE", value}).String(); strings.Contains(s, "hunter2") || !strings.Contains(s, "h:1") {
			t.Errorf("%s", s)
		}
	}
	if s := (Value{"A", "x\x1b[2J\ny\xff"}).String(); s != "A=x [2J y?" {
		t.Errorf("%q", s)
	}
}

// FuzzDiscover sets any variables to any values: the result is a valid job or an error that matches ErrInvalid, and
// neither shows a secret.
func FuzzDiscover(f *testing.F) {
	names, _ := filepath.Glob("testdata/discover/*.txtar")
	for _, name := range names {
		archive, err := txtar.ParseFile(name)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range archive.Files {
			if !strings.HasSuffix(file.Name, "=>") && !strings.Contains(string(file.Data), "flag ") {
				f.Add(string(file.Data))
			}
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		const secret = "Xq7-do-not-show"
		e := map[string]string{"LOCKSTEP_SECRET": secret}
		files := map[string]string{}
		for line := range strings.Lines(text) {
			line = strings.TrimRight(line, "\n")
			if rest, ok := strings.CutPrefix(line, "file "); ok {
				name, content, _ := strings.Cut(rest, " ")
				files[name] = content
			} else if name, value, ok := strings.Cut(line, "="); ok && name != "LOCKSTEP_SECRET" {
				e[name] = value
			}
		}
		job, err := Discover(Discovery{
			Getenv: env(e), Hostname: func() (string, error) { return "train-2", nil }, PID: 120, Folder: "/tmp/x",
			ReadFile: func(name string) ([]byte, error) {
				if text, ok := files[name]; ok {
					return []byte(text), nil
				}
				return nil, fs.ErrNotExist
			},
		})
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("%v does not match ErrInvalid", err)
			}
			if strings.Contains(err.Error(), secret) {
				t.Fatalf("the error shows the secret: %v", err)
			}
			return
		}
		if job.Workers < 1 || job.Worker < 0 || job.Worker >= job.Workers || job.LocalWorkers > job.Workers {
			t.Fatalf("%+v", job)
		}
		if job.Store != "" && job.Store != StorePMI {
			if again, err := storeURL(job.Store); err != nil || again != job.Store {
				t.Fatalf("store %q: %q, %v", job.Store, again, err)
			}
		}
		if job.Workers <= 1000 {
			checkResolver(t, job)
		}
		if text := job.Describe(); strings.Contains(text, secret) {
			t.Fatalf("the description shows the secret:\n%s", text)
		}
	})
}

// TestEverySourceIsDocumented checks that docs/clusters.md has a row for each source, in the order of precedence.
func TestEverySourceIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/clusters.md")
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	for _, name := range SourceNames() {
		i := strings.Index(string(text[at:]), "(`"+name+"`)")
		if i < 0 {
			t.Fatalf("docs/clusters.md has no row for (`%s`) after the sources that precede it", name)
		}
		at += i
	}
}

func TestJobString(t *testing.T) {
	for want, j := range map[string]*Job{
		"worker 0 of 2 (the chief), by torchrun": {Source: "torchrun", Workers: 2},
		"worker 1 of 2":                          {Worker: 1, Workers: 2},
		"a single-process job":                   {Source: noSource, Workers: 1},
	} {
		if got := j.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
