package train_test

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

// TestHashOfDigits: on the Go engine, steps of the README's training give the same weights on all processors, with all
// vector instructions and with none, and with any number of threads.
func TestHashOfDigits(t *testing.T) {
	const child = "LOCKSTEP_HASH_CHILD" // set in a process with fewer instructions
	const want = "f81eb8044aa6be6dc5a7205174472631623eaf28257715662c00bb9e3e482c2e"
	threads := []int{1, 2, 3, 8}
	if os.Getenv(child) != "" {
		threads = []int{2}
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, n := range threads {
		runtime.GOMAXPROCS(n)
		trainer := newTrainer(t, "go", 2, 64, 1, optimizer.Adam().LearningRate(0.003).Done(), models.CNN{Same: true}.Forward)
		examples := loadDigits(t).Train.Take(4*64).MapRandom(1, data.RandomShift(1))
		if _, err := trainer.Fit(t.Context(), examples.Batch(64), train.FitConfig{}); err != nil {
			t.Fatal(err)
		}
		got, err := trainer.WeightsHash(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("with %d threads the weights have hash %s, want %s", n, got, want)
		}
	}
	if runtime.GOARCH != "amd64" || os.Getenv(child) != "" {
		return
	}
	for _, off := range []string{"cpu.avx512f=off", "cpu.avx512f=off,cpu.avx2=off,cpu.fma=off"} {
		c := exec.Command(os.Args[0], "-test.run=^TestHashOfDigits$")
		c.Env = append(os.Environ(), child+"=1", "GODEBUG="+off)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("with %s: %v\n%s", off, err, out)
		}
	}
}
