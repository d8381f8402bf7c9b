package kubernetes

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// serverEnv makes the test binary a kube-apiserver, with its arguments.
const serverEnv = "LOCKSTEP_TEST_APISERVER"

func TestMain(m *testing.M) {
	if os.Getenv(serverEnv) != "" {
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	}
	os.Exit(m.Run())
}

// The modules whose folders have the definitions of JobSet and TrainJob. They are downloaded and not compiled.
var definitions = []struct{ module, folder string }{
	{"sigs.k8s.io/jobset@v0.12.0", "config/components/crd/bases"},
	{"github.com/kubeflow/trainer/v2@v2.3.0", "manifests/base/crds"},
}

// resources maps each kind of the manifests to its resource.
var resources = map[string]schema.GroupVersionResource{
	"Namespace":                {Version: "v1", Resource: "namespaces"},
	"Secret":                   {Version: "v1", Resource: "secrets"},
	"Service":                  {Version: "v1", Resource: "services"},
	"Job":                      {Group: "batch", Version: "v1", Resource: "jobs"},
	"JobSet":                   {Group: "jobset.x-k8s.io", Version: "v1alpha2", Resource: "jobsets"},
	"TrainJob":                 {Group: "trainer.kubeflow.org", Version: "v1alpha1", Resource: "trainjobs"},
	"CustomResourceDefinition": {Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
}

// server is a client of a kube-apiserver.
type server struct{ dynamic.Interface }

// start starts etcd in this process and a kube-apiserver in another one, on loopback, until the end of the test.
func start(t *testing.T) server {
	t.Helper()
	dir := t.TempDir()
	etcd := startEtcd(t, filepath.Join(dir, "etcd"))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	keyFile, tokenFile := filepath.Join(dir, "sa.key"), filepath.Join(dir, "tokens")
	token := rand.Text()
	for name, text := range map[string][]byte{
		keyFile:   pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
		tokenFile: []byte(token + ",test,test\n"),
	} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	port := freePort(t)
	cmd := exec.Command(os.Args[0], "--etcd-servers="+etcd, "--bind-address=127.0.0.1", "--secure-port="+port,
		"--cert-dir="+dir, "--token-auth-file="+tokenFile, "--authorization-mode=AlwaysAllow",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+keyFile,
		"--service-account-signing-key-file="+keyFile, "--service-cluster-ip-range=10.0.0.0/24",
		"--endpoint-reconciler-type=none")
	cmd.Env = append(os.Environ(), serverEnv+"=1")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("the end of kube-apiserver's log:\n%s", log.Bytes()[max(0, log.Len()-4000):])
		}
	})
	certificate := filepath.Join(dir, "apiserver.crt") // which the server makes
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		select {
		case <-ended:
			t.Fatal("kube-apiserver exited")
		default:
		}
		config := &rest.Config{
			Host: "https://127.0.0.1:" + port, BearerToken: token, QPS: -1,
			TLSClientConfig: rest.TLSClientConfig{CAFile: certificate},
		}
		c, err := dynamic.NewForConfig(config)
		if err == nil {
			_, err = c.Resource(resources["Namespace"]).Get(t.Context(), "default", metav1.GetOptions{})
		}
		if err == nil {
			return server{c}
		}
		if time.Now().After(deadline) {
			t.Fatalf("kube-apiserver is not ready after 3 minutes: %v", err)
		}
	}
}

// startEtcd starts an etcd server in this process and returns its URL.
func startEtcd(t *testing.T, dir string) string {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel = dir, "panic"
	address := func() []url.URL { return []url.URL{{Scheme: "http", Host: "127.0.0.1:" + freePort(t)}} }
	cfg.ListenClientUrls, cfg.ListenPeerUrls = address(), address()
	cfg.AdvertiseClientUrls, cfg.AdvertisePeerUrls = cfg.ListenClientUrls, cfg.ListenPeerUrls
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(time.Minute):
		t.Fatal("etcd is not ready after a minute")
	}
	return cfg.ListenClientUrls[0].String()
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// define creates the definitions of a module, and waits until the server knows them.
func (s server) define(t *testing.T, module, folder string) {
	t.Helper()
	out, err := exec.Command("go", "mod", "download", "-json", module).Output()
	if err != nil {
		t.Fatalf("go mod download %s: %v\n%s", module, err, out)
	}
	var downloaded struct{ Dir string }
	if err := json.Unmarshal(out, &downloaded); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(downloaded.Dir, folder, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	defined := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects(t, text) {
			if o.GetKind() != "CustomResourceDefinition" {
				continue
			}
			defined++
			c := s.Resource(resources[o.GetKind()])
			if _, err := c.Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			for !established(t, c, o.GetName()) {
				time.Sleep(50 * time.Millisecond)
			}
		}
	}
	if defined == 0 {
		t.Fatalf("%s has no definition in %s", module, folder)
	}
}

// established reports whether the server serves a defined resource. The test's deadline ends the wait for it.
func established(t *testing.T, c dynamic.ResourceInterface, name string) bool {
	o, err := c.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, ok := c.(map[string]any)
		return ok && m["type"] == "Established" && m["status"] == "True"
	})
}

// objects decodes a manifest of several documents.
func objects(t *testing.T, text []byte) (out []*unstructured.Unstructured) {
	t.Helper()
	d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	for {
		o := &unstructured.Unstructured{}
		err := d.Decode(o)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(o.Object) > 0 { // a document may consist of comments
			out = append(out, o)
		}
	}
}

// dryRun is kubectl create --dry-run=server --validate=strict: the server decodes, admits and validates an object, and
// stores nothing.
func (s server) dryRun(ctx context.Context, o *unstructured.Unstructured) error {
	resource, ok := resources[o.GetKind()]
	if !ok {
		return fmt.Errorf("unknown kind %s", o.GetKind())
	}
	if want := resource.GroupVersion().String(); o.GetAPIVersion() != want {
		return fmt.Errorf("%s of %s, want %s", o.GetKind(), o.GetAPIVersion(), want)
	}
	namespace := o.GetNamespace()
	if namespace == "" {
		namespace = "default"
	}
	_, err := s.Resource(resource).Namespace(namespace).Create(ctx, o, metav1.CreateOptions{
		DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict,
	})
	return err
}

// manifests are command lines of lockstep render kubernetes, and the kinds of what they print.
var manifests = []struct{ args, kinds string }{
	{"--nnodes 4", "Secret Service Job"},
	{"--nnodes 1 --secret mine", "Service Job"},
	{
		"--nnodes 3 --nproc-per-node 4 --namespace ml --name a-name --cpus 4 --gpus 2 --memory 1.5Gi --claim a:/a " +
			"--claim b.c:/b --max-restarts 3 --port 4000 -- /train --text $(HOME) - # yes é",
		"Secret Service Job",
	},
	{"--nnodes 4 --jobset", "Secret JobSet"},
	{
		"--nnodes 3 --jobset --nproc-per-node 4 --namespace ml --name a-name --cpus 4 --gpus 2 --memory 1.5Gi --claim a:/a " +
			"--claim b.c:/b --max-restarts 3 --port 4000 -- /train --text $(HOME) - # yes é",
		"Secret JobSet",
	},
	{"--nnodes 4 --trainjob --port 4000", "Secret TrainJob"},
	{
		"--nnodes 3 --trainjob --nproc-per-node 4 --namespace ml --name a-name --cpus 4 --gpus 2 --memory 1.5Gi " +
			"--claim a:/a --claim b.c:/b --runtime jax-distributed -- /train --text $(HOME) - # yes é",
		"Secret TrainJob",
	},
}

// TestManifests: a kube-apiserver accepts every manifest that lockstep render kubernetes prints. It refuses each one in
// which any single field has another name or a value of another type, so the first half of the test means something.
func TestManifests(t *testing.T) {
	command := filepath.Join(t.TempDir(), "lockstep")
	build := exec.Command("go", "build", "-C", "../..", "-o", command, "./cmd/lockstep")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	s := start(t)
	for _, d := range definitions {
		s.define(t, d.module, d.folder)
	}
	namespace := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": "ml"},
	}}
	if _, err := s.Resource(resources["Namespace"]).Create(t.Context(), namespace, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, m := range manifests {
		args := append([]string{"render", "kubernetes", "--image", "registry/train:7"}, strings.Fields(m.args)...)
		text, err := exec.Command(command, args...).Output()
		if err != nil {
			t.Fatalf("lockstep %s: %v", strings.Join(args, " "), err)
		}
		all := objects(t, text)
		var kinds []string
		for _, o := range all {
			kinds = append(kinds, o.GetKind())
		}
		if got := strings.Join(kinds, " "); got != m.kinds {
			t.Errorf("%s: %s, want %s", m.args, got, m.kinds)
		}
		for _, o := range all {
			if err := s.dryRun(t.Context(), o); err != nil {
				t.Errorf("%s: %s is refused: %v", m.args, o.GetKind(), err)
			}
			tried := 0
			broken(o.Object, "", func(change, field string) {
				tried++
				err := s.dryRun(t.Context(), o)
				switch {
				case err == nil:
					t.Errorf("%s: %s is accepted with %s of %s", m.args, o.GetKind(), change, field)
				case !apierrors.IsBadRequest(err) && !apierrors.IsInvalid(err): // such as a server that has ended
					t.Errorf("%s: %s with %s of %s is not refused as invalid, but: %v", m.args, o.GetKind(), change, field, err)
				}
			})
			if tried < 5 {
				t.Errorf("%s: %d changes of %s", m.args, tried, o.GetKind())
			}
		}
	}
}

// free are the fields whose own fields have any names.
var free = []string{"stringData", "selector", "limits"}

// broken calls try with every single field of an object renamed, or replaced by a list of a list, which no field of a
// manifest is. The object's own name, version and kind are as they were.
func broken(o map[string]any, path string, try func(change, field string)) {
	for _, name := range slices.Sorted(maps.Keys(o)) {
		value := o[name]
		field := path + "." + name
		if path == "" && (name == "apiVersion" || name == "kind" || name == "metadata") {
			continue // they decide where the object is sent
		}
		o[name] = []any{[]any{"x"}}
		try("another type", field)
		delete(o, name)
		if !slices.ContainsFunc(free, func(f string) bool { return strings.HasSuffix(path, "."+f) }) {
			o[name+"x"] = value
			try("another name", field)
			delete(o, name+"x")
		}
		o[name] = value
		switch value := value.(type) {
		case map[string]any:
			broken(value, field, try)
		case []any:
			for i, each := range value {
				if each, ok := each.(map[string]any); ok {
					broken(each, fmt.Sprintf("%s[%d]", field, i), try)
				}
			}
		}
	}
}
