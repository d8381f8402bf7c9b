package run

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
)

// manifest holds the fields of a rendered Kubernetes object that a test reads.
type manifest struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	Metadata   struct{ Name, Namespace string }
	StringData map[string]string `yaml:"stringData"`
	Spec       struct {
		ClusterIP  string `yaml:"clusterIP"`
		Publish    bool   `yaml:"publishNotReadyAddresses"`
		Selector   map[string]string
		Replicated []struct {
			Name     string
			Replicas int
			Template struct{ Spec jobSpec }
		} `yaml:"replicatedJobs"`
		Failure struct {
			MaxRestarts int `yaml:"maxRestarts"`
		} `yaml:"failurePolicy"`
		jobSpec `yaml:",inline"`
	}
}

type jobSpec struct {
	CompletionMode string `yaml:"completionMode"`
	Completions    int
	Parallelism    int
	BackoffLimit   int `yaml:"backoffLimit"`
	Template       struct {
		Spec struct {
			Subdomain  string
			Restart    string `yaml:"restartPolicy"`
			Containers []struct {
				Image   string
				Command []string
				Env     []struct {
					Name, Value string
					From        struct {
						Field struct {
							Path string `yaml:"fieldPath"`
						} `yaml:"fieldRef"`
					} `yaml:"valueFrom"`
				}
				Resources struct{ Limits map[string]string }
				Mounts    []struct {
					Name string
					Path string `yaml:"mountPath"`
				} `yaml:"volumeMounts"`
			}
			Volumes []struct {
				Name   string
				Secret struct {
					Name string `yaml:"secretName"`
				}
				Claim struct {
					Name string `yaml:"claimName"`
				} `yaml:"persistentVolumeClaim"`
			}
		}
	}
}

// rendered returns the objects of a manifest.
func rendered(t interface {
	Helper()
	Fatalf(string, ...any)
}, r *rendering,
) []manifest {
	t.Helper()
	var b bytes.Buffer
	if r.Name == "" {
		r.Name = "train"
	}
	if r.port == 0 {
		r.port = cluster.StorePort
	}
	if err := r.kubernetes(&b, "a-new-secret"); err != nil {
		t.Fatalf("%v", err)
	}
	var out []manifest
	d := yaml.NewDecoder(&b)
	for {
		var m manifest
		err := d.Decode(&m)
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatalf("%v", err)
		}
		out = append(out, m)
	}
}

// kinds lists the objects of a manifest.
func kinds(all []manifest) string {
	var out []string
	for _, m := range all {
		out = append(out, m.APIVersion+"/"+m.Kind+"/"+m.Metadata.Name)
	}
	return strings.Join(out, " ")
}

// TestKubernetesManifestIsAJob simulates Kubernetes: every pod of the manifest gets the environment and name that
// Kubernetes and the JobSet controller give it, and must detect the requested job.
func TestKubernetesManifestIsAJob(t *testing.T) {
	for _, test := range []struct {
		jobSet bool
		port   int
	}{{false, 0}, {true, 0}, {false, 4000}} {
		jobSet := test.jobSet
		all := rendered(t, &rendering{
			Image: "i", Nodes: 3, Each: 1, JobSet: jobSet, port: test.port, program: []string{"p"},
			MaxRestarts: 2, claims: []string{"c:/data"},
		})
		job := all[len(all)-1].Spec.jobSpec
		want, domain := "v1/Secret/train v1/Service/train batch/v1/Job/train", "train"
		if jobSet {
			want = "v1/Secret/train jobset.x-k8s.io/v1alpha2/JobSet/train"
			set := all[len(all)-1].Spec
			job = set.Replicated[0].Template.Spec
			domain = all[len(all)-1].Metadata.Name // the JobSet creates a Service with its name
			if set.Failure.MaxRestarts != 2 || job.BackoffLimit != 0 || set.Replicated[0].Replicas != 1 {
				t.Errorf("JobSet: %d restarts, back-off limit %d, %d replicas", set.Failure.MaxRestarts, job.BackoffLimit,
					set.Replicated[0].Replicas)
			}
		} else if s := all[1].Spec; s.ClusterIP != "None" || !s.Publish || s.Selector["job-name"] != "train" ||
			job.BackoffLimit != 6 {
			t.Errorf("the Service is %+v, the back-off limit %d", s, job.BackoffLimit)
		}
		if kinds(all) != want {
			t.Fatalf("%s, want %s", kinds(all), want)
		}
		pod := job.Template.Spec
		if job.CompletionMode != "Indexed" || job.Completions != 3 || job.Parallelism != 3 || pod.Restart != "Never" ||
			pod.Subdomain != domain {
			t.Fatalf("%+v", job)
		}
		c := pod.Containers[0]
		if all[0].StringData["secret"] != "a-new-secret" || pod.Volumes[0].Secret.Name != "train" ||
			c.Mounts[0].Path+"/secret" != "/etc/lockstep/secret" {
			t.Errorf("the secret is %v, the volumes %+v, mounted %+v", all[0].StringData, pod.Volumes, c.Mounts)
		}
		if pod.Volumes[1].Claim.Name != "c" || c.Mounts[1].Name != pod.Volumes[1].Name || c.Mounts[1].Path != "/data" {
			t.Errorf("the volumes are %+v, mounted %+v", pod.Volumes, c.Mounts)
		}
		for index := range 3 {
			name := fmt.Sprintf("train-%d", index)
			if jobSet {
				name = fmt.Sprintf("train-workers-0-%d", index)
			}
			e := map[string]string{"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": strconv.Itoa(index)}
			for _, v := range c.Env {
				e[v.Name] = v.Value
				switch v.From.Field.Path { // set by the JobSet controller
				case "metadata.annotations['jobset.sigs.k8s.io/jobset-name']":
					e[v.Name] = "train"
				case "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']":
					e[v.Name] = "workers"
				case "metadata.annotations['jobset.sigs.k8s.io/job-index']":
					e[v.Name] = "0"
				case "":
				default:
					t.Errorf("%s is from %s, which no pod has", v.Name, v.From.Field.Path)
				}
			}
			full := name + "." + pod.Subdomain
			found, err := cluster.Discover(cluster.Discovery{
				Getenv:   func(k string) (string, bool) { v, ok := e[k]; return v, ok },
				Hostname: func() (string, error) { return name, nil },
				ReadFile: func(file string) ([]byte, error) {
					if file == "/etc/hosts" {
						return []byte("127.0.0.1\tlocalhost\n10.1.1.1\t" + full + ".ns.svc.cluster.local\t" + name + "\n"), nil
					}
					return nil, fs.ErrNotExist
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			first := strings.Replace(full, name, name[:len(name)-1]+"0", 1)
			if found.Worker != index || found.Workers != 3 || !strings.HasPrefix(found.Store, "tcp://"+first) || found.Hosted ||
				test.port != 0 && !strings.HasSuffix(found.Store, ":4000") {
				t.Errorf("pod %d: %s", index, found.Describe())
			}
			if e["LOCKSTEP_SECRET_FILE"] != "/etc/lockstep/secret" {
				t.Errorf("pod %d: %v", index, e)
			}
		}
	}
}

// TestTrainJobIsAJob simulates Kubeflow's Trainer: every pod gets the environment that the runtimes for torchrun and
// JAX give it, and must detect the requested job.
func TestTrainJobIsAJob(t *testing.T) {
	for _, runtime := range []string{"torch-distributed", "jax-distributed"} {
		r := &rendering{
			Name: "train", Image: "i", Nodes: 3, Each: 1, TrainJob: true, Runtime: runtime, port: cluster.StorePort,
			SecretName: "s", program: []string{"p"},
		}
		var b bytes.Buffer
		if err := r.kubernetes(&b, ""); err != nil {
			t.Fatal(err)
		}
		var job struct {
			Kind     string
			Metadata struct{ Name string }
			Spec     struct {
				Ref     struct{ Name string } `yaml:"runtimeRef"`
				Trainer struct {
					Command []string
					Nodes   int `yaml:"numNodes"`
					Each    int `yaml:"numProcPerNode"`
					Env     []struct{ Name, Value string }
				}
			}
		}
		if err := yaml.Unmarshal(b.Bytes(), &job); err != nil {
			t.Fatal(err)
		}
		trainer := job.Spec.Trainer
		if job.Kind != "TrainJob" || job.Spec.Ref.Name != runtime || !slices.Equal(trainer.Command, []string{"p"}) {
			t.Errorf("%+v", job)
		}
		first := job.Metadata.Name + "-node-0-0." + job.Metadata.Name
		for index := range 3 {
			i, n := strconv.Itoa(index), strconv.Itoa(trainer.Nodes)
			e := map[string]string{"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": i}
			if runtime == "torch-distributed" {
				e["PET_NNODES"], e["PET_NODE_RANK"], e["PET_NPROC_PER_NODE"] = n, i, strconv.Itoa(trainer.Each)
				e["PET_MASTER_ADDR"], e["PET_MASTER_PORT"] = first, "29500"
			} else {
				e["JAX_NUM_PROCESSES"], e["JAX_PROCESS_ID"], e["JAX_COORDINATOR_ADDRESS"] = n, i, first+":29500"
			}
			for _, v := range trainer.Env {
				e[v.Name] = v.Value
			}
			found, err := cluster.Discover(cluster.Discovery{
				Getenv:   func(k string) (string, bool) { v, ok := e[k]; return v, ok },
				Hostname: func() (string, error) { return "train-node-0-" + i, nil },
				ReadFile: func(string) ([]byte, error) { return nil, fs.ErrNotExist },
			})
			if err != nil {
				t.Fatal(err)
			}
			if found.Worker != index || found.Workers != 3 || found.Store != "tcp://"+first+":29500" ||
				e["LOCKSTEP_SECRET_FILE"] != "/etc/lockstep/secret" {
				t.Errorf("pod %d: %v\n%s", index, e, found.Describe())
			}
		}
	}
}

// TestKubernetesRunsSeveralWorkersInAPod: a pod runs them by lockstep run, with the rendezvous at the first pod.
func TestKubernetesRunsSeveralWorkersInAPod(t *testing.T) {
	all := rendered(t, &rendering{Image: "i", Nodes: 2, Each: 4, SecretName: "mine", program: []string{"p", "-x"}})
	if kinds(all) != "v1/Service/train batch/v1/Job/train" {
		t.Fatal(kinds(all))
	}
	pod := all[1].Spec.Template.Spec
	want := strings.Fields("lockstep run --nnodes 2 --node-rank $(JOB_COMPLETION_INDEX) --nproc-per-node 4 " +
		"--rdzv-backend tcp --rdzv-endpoint train-0.train:29400 --rdzv-id train -- p -x")
	if got := pod.Containers[0].Command; !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	played := slices.Clone(want[1:])
	played[slices.Index(played, "$(JOB_COMPLETION_INDEX)")] = "1" // as Kubernetes does
	command, rest, err := clitest.Commands().Find(played)
	if err == nil {
		err = command.ParseFlags(rest)
	}
	if err != nil || command.Name() != "run" || !slices.Equal(command.Flags().Args(), []string{"p", "-x"}) {
		t.Errorf("lockstep %s does not accept this: %v, %q are left", command.Name(), err, command.Flags().Args())
	}
	for _, v := range pod.Containers[0].Env {
		if v.Name == cluster.EnvWorkers {
			t.Errorf("the pod sets %s=%s, which is the number of pods", v.Name, v.Value)
		}
	}
	if pod.Volumes[0].Secret.Name != "mine" {
		t.Errorf("%+v", pod.Volumes)
	}
}

// TestRenderKeepsArguments: the program gets its arguments unchanged, through YAML and Kubernetes, and through a shell.
func TestRenderKeepsArguments(t *testing.T) {
	bash, err := exec.LookPath("bash")
	rapid.Check(t, func(rt *rapid.T) {
		args := rapid.SliceOfN(rapid.StringOf(rapid.Rune().Filter(func(c rune) bool { return c != 0 && c != 0xfffd })), 1,
			6).Draw(rt, "args")
		args = append(args,
			rapid.SampledFrom([]string{
				"$(HOME)", "$$(A)", "it's", "a\nb", "- x: y", "#", "", "\\", "`id`", "!!int 3",
				"é\u2028",
			}).Draw(rt, "special"))
		all := rendered(rt, &rendering{Image: "i", Nodes: 2, Each: 1, program: slices.Clone(args)})
		var got []string
		for _, word := range all[len(all)-1].Spec.Template.Spec.Containers[0].Command {
			got = append(got, strings.ReplaceAll(word, "$$(", "$(")) // as Kubernetes does
		}
		if !slices.Equal(got, args) {
			rt.Fatalf("Kubernetes: got %q, want %q", got, args)
		}
		if err != nil {
			return // no shell here
		}
		var quoted []string
		for _, a := range args {
			quoted = append(quoted, shellQuote(a))
		}
		out, err := exec.Command(bash, "-c", `printf '%s\0' `+strings.Join(quoted, " ")).Output()
		if want := strings.Join(args, "\x00") + "\x00"; err != nil || string(out) != want {
			rt.Fatalf("shell: got %q, want %q, %v", out, want, err)
		}
	})
}
