package layers

import (
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const modulePath = "github.com/lockstep-ml/lockstep"

// mayImport lists, for every package of the module (a trailing /... covers what lies below), the packages of the module
// that it may import. It is the diagram of ARCHITECTURE.md in a form that a test can check.
var mayImport = []struct {
	pkg     string
	imports []string
}{
	{"", nil}, // the root: a page of documentation
	{"tensor", nil},
	{"internal/kernel/...", []string{"tensor"}},
	{"timeline", nil},
	{"dashboard", []string{"cluster/private", "cluster/status", "cluster/rendezvous", "internal/listener", "timeline"}},
	{"timeline/timelinetest", nil},
	{"internal/stacks", nil},
	{"internal/pause", nil},
	{"internal/ranges", nil},
	{"internal/units", nil},
	{"internal/terminal", nil},
	{"internal/redact", nil},
	{"internal/race", nil},
	{"internal/formula", nil},
	{"internal/chart", nil},
	{"internal/freeport", nil},
	{"internal/browser", nil},
	{"internal/pictures", []string{"timeline/timelinetest"}},
	{"internal/testnet", nil},
	{"internal/foreign", nil},
	{"internal/layers", []string{"..."}},
	{"internal/cgroup", nil},
	{"internal/memlimit", []string{"internal/cgroup"}},
	{"internal/affinity", []string{"internal/cgroup"}},
	{"internal/listener", nil},
	{"transport/...", []string{
		"tensor", "transport/...", "internal/affinity", "internal/listener", "internal/memlimit",
		"internal/transport/composite", "internal/transport/overlay", "internal/transport/waiting",
	}},
	{"internal/transport/...", []string{"tensor", "transport/...", "internal/transport/...", "internal/affinity"}},
	{"internal/librarytest", []string{"tensor", "collective", "collective/library", "transport/mem"}},
	{"internal/storetest", []string{"cluster/rendezvous"}},
	{"collective/plan", []string{"tensor"}},
	{"collective/chooser", []string{"tensor", "collective/plan", "internal/units"}},
	{"collective/internal/byrank", nil},
	{"collective/internal/fingerprint", []string{
		"tensor", "transport", "collective/flight", "collective/plan", "collective/internal/byrank",
	}},
	{"collective/internal/executor", []string{
		"tensor", "internal/affinity", "internal/kernel", "transport", "collective/plan", "collective/internal/byrank",
	}},
	{"collective/internal/fault", []string{
		"transport", "tensor", "collective/plan", "collective/internal/fingerprint", "internal/ranges",
	}},
	{"collective/mpi", []string{"tensor", "internal/foreign", "collective", "collective/library/..."}},
	{"collective/nccl", []string{"tensor", "internal/foreign", "collective", "collective/library/..."}},
	{"collective/bench", []string{
		"tensor", "internal/kernel", "internal/memlimit", "internal/affinity", "transport/...", "collective/...",
		"cluster/secret",
	}},
	{"collective/...", []string{
		"tensor", "internal/kernel", "internal/memlimit", "internal/affinity", "internal/ranges", "transport/...",
		"collective/...", "timeline",
	}},
	{"simulate", []string{"tensor", "collective/plan", "collective/chooser", "internal/memlimit", "timeline"}},
	{"cluster/doctor", []string{
		"cluster/rendezvous", "cluster/worker", "collective", "tensor", "internal/ranges", "internal/units",
	}},
	{"cluster/worker", []string{
		"cluster/...", "collective/...", "transport/...", "tensor", "internal/listener",
		"internal/affinity", "internal/pause", "internal/ranges", "internal/redact", "internal/stacks", "timeline",
	}},
	{"cluster/rendezvous/...", []string{"cluster/...", "internal/listener", "internal/pause", "internal/redact"}},
	{"cluster/membership", []string{"cluster/rendezvous", "internal/pause"}},
	{"cluster/status", []string{"cluster/membership", "cluster/rendezvous", "internal/pause", "timeline"}},
	{"cluster/launch", []string{
		"cluster/...", "internal/affinity", "internal/cgroup", "internal/pause", "internal/redact",
	}},
	{"cluster/...", []string{"cluster/...", "internal/pause", "internal/redact"}},
	{"engine", []string{"tensor"}},
	{"engine/enginetest", []string{"tensor", "engine"}},
	{"engine/gomlx/dataparallel", []string{
		"tensor", "engine/gomlx/internal/stages", "collective", "cluster/worker",
	}},
	{"engine/gomlx/...", []string{
		"tensor", "data", "engine", "internal/kernel", "internal/record", "engine/gomlx/...", "backend",
	}},
	{"internal/record", nil},
	{"backend/internal/...", []string{"internal/kernel", "tensor"}},
	{"backend", []string{"internal/record", "backend/internal/..."}},
	{"data/...", []string{"tensor", "data/...", "internal/memlimit"}},
	{"distribute/internal/deadlock", []string{"tensor", "collective", "internal/stacks"}},
	{"distribute/internal/devicelist", []string{"distribute/device", "distribute/internal/..."}},
	{"distribute/internal/...", []string{"tensor", "collective", "internal/kernel", "data", "distribute/internal/..."}},
	{"distribute/device", []string{"tensor", "distribute/internal/..."}},
	{"distribute", []string{
		"tensor", "collective", "collective/packing", "collective/mpi", "collective/nccl",
		"transport/mem", "distribute/internal/...", "distribute/device", "internal/stacks", "internal/kernel", "engine",
		"data", "cluster/...", "timeline",
	}},
	{"train/compress", []string{"tensor", "internal/kernel"}},
	{"train/...", []string{
		"tensor", "internal/kernel", "internal/ranges", "internal/stacks", "internal/terminal", "engine", "data/...",
		"distribute", "train/...", "cluster/...", "timeline",
	}},
	{"cmd/lockstep", []string{"cmd/lockstep/internal/root"}},
	{"cmd/lockstep/internal/root", []string{"cmd/lockstep/internal/..."}},
	{"cmd/lockstep/internal/engines", []string{"engine/gomlx", "cmd/lockstep/internal/cli"}},
	{"cmd/lockstep/internal/machine", []string{"cluster", "internal/memlimit"}},
	{"cmd/lockstep/internal/page", []string{"train/checkpoint", "internal/chart"}},
	{"cmd/lockstep/internal/clitest", []string{"train/checkpoint"}},
	{"cmd/lockstep/internal/cli", []string{
		"train/...", "internal/affinity", "internal/terminal", "internal/units", "cmd/lockstep/internal/machine",
	}},
	{"cmd/lockstep/internal/monitor", []string{
		"cluster/rendezvous", "cluster/status", "dashboard", "internal/pause", "internal/terminal", "internal/units",
		"cmd/lockstep/internal/cli",
	}},
	{"cmd/lockstep/internal/run", []string{
		"cluster/...", "internal/affinity", "internal/redact", "internal/terminal", "cmd/lockstep/internal/cli",
		"cmd/lockstep/internal/monitor",
	}},
	{"cmd/lockstep/internal/inspect", []string{
		"cluster/...", "collective/...", "simulate", "transport/shm", "internal/foreign", "internal/kernel",
		"internal/units", "internal/affinity", "tensor", "cmd/lockstep/internal/cli", "cmd/lockstep/internal/monitor",
		"cmd/lockstep/internal/machine", "cmd/lockstep/internal/page", "cmd/lockstep/internal/run",
	}},
	{"cmd/lockstep/internal/setup", []string{
		"tensor", "timeline", "collective", "cluster/...", "engine/...", "distribute", "train/...", "internal/listener",
		"cmd/lockstep/internal/cli",
	}},
	{"cmd/lockstep/internal/datasets", []string{
		"tensor", "data/...", "engine/...", "train/...", "cmd/lockstep/internal/cli", "cmd/lockstep/internal/setup",
	}},
	{"cmd/lockstep/internal/training", []string{
		"tensor", "data/...", "collective/...", "cluster/...", "engine/...", "distribute/...", "train/...", "internal/chart",
		"internal/units", "cmd/lockstep/internal/cli", "cmd/lockstep/internal/monitor", "cmd/lockstep/internal/machine",
		"cmd/lockstep/internal/page", "cmd/lockstep/internal/datasets", "cmd/lockstep/internal/setup",
	}},
	{"cmd/lockstep/internal/predict", []string{
		"tensor", "data/...", "engine/...", "train/...", "cmd/lockstep/internal/cli", "cmd/lockstep/internal/datasets",
		"cmd/lockstep/internal/setup", "cmd/lockstep/internal/training",
	}},
	{"cmd/lockstep/internal/bench", []string{
		"tensor", "backend", "data/...", "collective/...", "cluster/...", "engine/...", "distribute", "train/...",
		"internal/affinity", "internal/chart", "internal/memlimit", "internal/terminal", "internal/units",
		"cmd/lockstep/internal/cli", "cmd/lockstep/internal/machine", "cmd/lockstep/internal/run",
		"cmd/lockstep/internal/setup",
	}},
	{"examples/...", []string{"..."}},
}

// reachesGoMLX lists the packages that may depend on GoMLX, at any depth.
var reachesGoMLX = []string{"backend", "internal/record", "engine/gomlx/...", "cmd/...", "examples/..."}

func TestImportsGoOneWay(t *testing.T) {
	for _, p := range list(t, "{{.ImportPath}}|{{join .Imports \" \"}}", "./...") {
		name := strings.TrimPrefix(strings.TrimPrefix(p.path, modulePath), "/")
		i := slices.IndexFunc(mayImport, func(r struct {
			pkg     string
			imports []string
		},
		) bool {
			return covers(r.pkg, name)
		})
		if i < 0 {
			t.Errorf("package %s is in no row of mayImport: add a row there and a line in ARCHITECTURE.md", name)
			continue
		}
		for _, imp := range p.others {
			if rest, inside := strings.CutPrefix(imp, modulePath+"/"); inside &&
				!slices.ContainsFunc(mayImport[i].imports, func(r string) bool { return covers(r, rest) }) {
				t.Errorf("package %s imports %s; it may import only %v", name, rest, mayImport[i].imports)
			}
		}
	}
}

// notGoMLX are modules beside GoMLX that contain nothing of it: tokenizers, and how numbers are printed.
var notGoMLX = []string{"github.com/gomlx/go-huggingface", "github.com/gomlx/compute/support/humanize"}

func TestOnlyTheEngineReachesGoMLX(t *testing.T) {
	for _, p := range list(t, "{{.ImportPath}}|{{join .Deps \" \"}}", "./...") {
		name := strings.TrimPrefix(strings.TrimPrefix(p.path, modulePath), "/")
		if slices.ContainsFunc(reachesGoMLX, func(r string) bool { return covers(r, name) }) {
			continue
		}
		for _, dep := range p.others {
			if strings.HasPrefix(dep, "github.com/gomlx/") && !slices.ContainsFunc(notGoMLX, func(prefix string) bool {
				return strings.HasPrefix(dep, prefix)
			}) {
				t.Errorf("package %s depends on %s; only %v may", name, dep, reachesGoMLX)
				break
			}
		}
	}
}

// covers reports whether name is the package of the pattern, or lies below a pattern that ends in "...".
func covers(pattern, name string) bool {
	if dir, below := strings.CutSuffix(pattern, "..."); below {
		return name == path.Clean(dir) || strings.HasPrefix(name, dir)
	}
	return pattern == name
}

type listed struct {
	path   string
	others []string
}

func list(t *testing.T, format string, patterns ...string) []listed {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-f", format}, patterns...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", cmd, err)
	}
	var rows []listed
	for line := range strings.Lines(string(out)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), "|")
		rows = append(rows, listed{name, strings.Fields(rest)})
	}
	if len(rows) == 0 {
		t.Fatalf("%v listed no package", cmd)
	}
	return rows
}
