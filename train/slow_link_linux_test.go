package train_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/internal/testnet"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/train"
)

// linkEnv makes TestSlowLinkProcesses run as one worker of a job.
const linkEnv = "LOCKSTEP_TEST_LINK"

const (
	linkSleep = 50 * time.Millisecond // in each step: the workers do not compete for cores
	linkRate  = "500mbit"             // 1.8 MB to the next worker in the ring take 25 ms longer or more: 30 % of a step
	linkFrom  = 100                   // the step after which the link is capped
	linkUntil = 160
)

// linkWorker trains 301,000 parameters as one worker until a straggler is named, which the chief prints.
func linkWorker(t *testing.T) {
	t.Helper()
	e, err := gomlx.Open("go", gomlx.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
		Engine: e, Devices: []string{"CPU:0"}, Join: clusterworker.Config{DataPlaintext: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	m := &gomlx.Model{
		Forward: models.MLP{Hidden: []int{512, 512}}.Forward, Optimizer: sgd(),
		Loss: gomlx.SparseCategoricalCrossEntropyLogits,
	}
	cfg := train.Config{
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
		Labels: []engine.Feature{{DType: tensor.Int32}}, GlobalBatch: 4, Seed: 1,
	}
	trainer, err := train.New(t.Context(), s, m, cfg)
	if err != nil {
		t.Fatal(err)
	}
	step := 0
	named := train.Callback{OnStepEnd: func(_ context.Context, s train.Step) error {
		if step++; step == linkFrom {
			fmt.Println("capped after this step")
		}
		time.Sleep(linkSleep)
		if s.Straggler == nil {
			return nil
		}
		text, err := json.Marshal(s.Straggler)
		fmt.Printf("straggler: %s\n", text)
		trainer.Stop()
		return err
	}}
	_, err = trainer.Fit(t.Context(), loadDigits(t).Train.Repeat(-1).Batch(4), train.FitConfig{
		StepsPerEpoch: linkUntil, Callbacks: []train.Callback{named},
	})
	for _, end := range []func() error{trainer.Close, s.Close, e.Close} {
		if err == nil {
			err = end()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestSlowLinkProcesses: the link of one of four real workers, each in its own network namespace, is capped while they
// train, so that a step takes at least 30 % longer. That worker, or one of its links, is named within 20 steps.
func TestSlowLinkProcesses(t *testing.T) {
	if os.Getenv(linkEnv) != "" {
		linkWorker(t)
		return
	}
	race.SkipTimed(t, "it trains about 120 steps of 60 ms in network namespaces")
	const workers, slowest = 4, 2
	network := testnet.NewSwitch(t, "10.84.0", workers)
	var why string
	for try := range 3 { // a busy machine may delay the steps of any worker
		if try > 0 {
			network.UncapLink(t, slowest)
		}
		s, out := slowLinkOf(t, network, workers, slowest)
		if s.Concerns(slowest) && strings.HasPrefix(s.Cause, "link") && s.Step > linkFrom && s.Step <= linkFrom+20 {
			t.Log(s)
			return
		}
		why = fmt.Sprintf("named %v\n%s", s, out)
	}
	t.Errorf("want a link of worker %d until step %d: %s", slowest, linkFrom+20, why)
}

// slowLinkOf returns the straggler that a job of several processes names, in which the link of one host becomes slow.
func slowLinkOf(t *testing.T, network *testnet.Switch, workers, slowest int) (*timeline.Straggler, string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var addresses []string
	for w := range workers {
		addresses = append(addresses, fmt.Sprintf(`"10.84.0.%d:7070"`, w+1))
	}
	key := secret.New().Text()
	commands, outs := make([]*exec.Cmd, workers), make([]bytes.Buffer, workers)
	var chief *bufio.Scanner
	for w := range commands {
		on := network.Command(w, exe, "-test.run=^TestSlowLinkProcesses$")
		cmd := exec.CommandContext(t.Context(), on[0], on[1:]...)
		cmd.Env = append(os.Environ(), linkEnv+"=1", "LOCKSTEP_SECRET="+key, "GOMAXPROCS=1",
			fmt.Sprintf(`TF_CONFIG={"cluster":{"worker":[%s]},"task":{"type":"worker","index":%d}}`,
				strings.Join(addresses, ","), w))
		cmd.Stderr = &outs[w]
		if w > 0 {
			cmd.Stdout = &outs[w]
		} else {
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			chief = bufio.NewScanner(out)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		commands[w] = cmd
	}
	var named *timeline.Straggler
	for chief.Scan() {
		line := chief.Text()
		if text, ok := strings.CutPrefix(line, "straggler: "); ok && named == nil {
			named = &timeline.Straggler{}
			if err := json.Unmarshal([]byte(text), named); err != nil {
				t.Fatal(err)
			}
		}
		if line == "capped after this step" {
			network.CapLink(t, slowest, linkRate, "128kb")
		}
	}
	for w, cmd := range commands {
		if err := cmd.Wait(); err != nil {
			t.Fatalf("worker %d: %v\n%s", w, err, &outs[w])
		}
	}
	return named, outs[0].String()
}
