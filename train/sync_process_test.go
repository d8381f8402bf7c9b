package train_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/internal/freeport"
)

// replicasEnv makes TestSyncBatchNormProcesses run as one worker of a job, with this number of replicas.
const replicasEnv = "LOCKSTEP_TEST_REPLICAS"

// strategyOf returns a strategy of this process's replicas, and of those of the other workers if this process is one.
func strategyOf(e engine.Engine, replicas int) (*distribute.Strategy, error) {
	if os.Getenv(replicasEnv) == "" {
		return distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	}
	var devices []string
	for i := range replicas {
		devices = append(devices, fmt.Sprintf("CPU:%d", i))
	}
	return distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{Engine: e, Devices: devices})
}

// TestSyncBatchNormProcesses checks that a model that normalises over all replicas, with additional all-reduces inside
// the step, trains to the same bits in one process and in several.
func TestSyncBatchNormProcesses(t *testing.T) {
	t.Parallel()
	if n := os.Getenv(replicasEnv); n != "" {
		replicas := 0
		fmt.Sscan(n, &replicas)
		fmt.Println("trained:", trainNormalised(t, "go", replicas, layer.SyncBatchNorm).hash)
		return
	}
	want := trainNormalised(t, "go", 3, layer.SyncBatchNorm).hash
	layouts := [][]int{{1, 2}, {1, 1, 1}}
	if testing.Short() {
		t.Log("-short: one layout only")
		layouts = layouts[:1]
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, layout := range layouts {
		addresses := make([]string, len(layout))
		for w := range layout {
			addresses[w] = fmt.Sprintf("%q", fmt.Sprintf("127.0.0.1:%d", freeport.Take(t, 1)))
		}
		var commands []*exec.Cmd
		outs := make([]bytes.Buffer, len(layout))
		for w, replicas := range layout {
			cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestSyncBatchNormProcesses$")
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", replicasEnv, replicas),
				fmt.Sprintf(`TF_CONFIG={"cluster":{"worker":[%s]},"task":{"type":"worker","index":%d}}`,
					strings.Join(addresses, ","), w))
			cmd.Stdout, cmd.Stderr = &outs[w], &outs[w]
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			commands = append(commands, cmd)
		}
		for w, cmd := range commands {
			if err := cmd.Wait(); err != nil || !strings.Contains(outs[w].String(), "trained: "+want) {
				t.Errorf("%v: worker %d: %v\n%s\nwant %s", layout, w, err, &outs[w], want)
			}
		}
	}
}
