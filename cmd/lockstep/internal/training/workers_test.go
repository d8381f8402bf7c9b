package training

import (
	"slices"
	"testing"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
)

// ofOneWorker are the flags that need no comparison although their values are not the names of files or addresses: they
// are about what one worker has, waits for or writes.
var ofOneWorker = []string{
	"strategy", "replicas", "devices", "engine", "progress", "save-every", "keep", "log-every", "worker", "workers",
	"rdzv-id", "data-plaintext", "rdzv-timeout", "heartbeat-timeout", "collective-timeout", "progress-timeout",
	"port-range", "no-shared-memory", "mixed-engines", "mixed-builds",
}

// TestComparedFlags: workers compare the values of all flags except those of one worker, and those whose values are
// names on a host. A new flag is compared unless it is marked.
func TestComparedFlags(t *testing.T) {
	flags := New().Flags()
	compared := map[string]string{}
	cli.Compared(flags, func(name, value string) { compared[name] = value })
	flags.VisitAll(func(f *pflag.Flag) {
		kind, _ := pflag.UnquoteUsage(f)
		value, isCompared := compared[f.Name]
		onHost := slices.Contains([]string{"file", "folder", "path", "address", "host:port"}, kind)
		switch {
		case onHost && isCompared && value != "not given":
			t.Errorf("--%s, the name of a %s, is compared: want NotCompared or ComparedIfGiven", f.Name, kind)
		case !onHost && isCompared == slices.Contains(ofOneWorker, f.Name):
			t.Errorf("--%s is compared: %v", f.Name, isCompared)
		}
	})
	for name, want := range map[string]string{"weights": "not given", "seed": "1", "tensorboard": "not given"} {
		if compared[name] != want {
			t.Errorf("--%s is compared as %q, want %q", name, compared[name], want)
		}
	}
}
