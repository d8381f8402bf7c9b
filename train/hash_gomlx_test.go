package train_test

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/train"
)

// TestHashOfDigits: on the Go engine, steps of the README's training give the same weights on all processors, with all
// vector instructions and with none, and with any number of threads, also in half width.
func TestHashOfDigits(t *testing.T) {
	const child = "LOCKSTEP_HASH_CHILD" // set in a process with fewer instructions
	threads := []int{1, 2, 3, 8}
	if os.Getenv(child) != "" {
		threads = []int{2}
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, n := range threads {
		runtime.GOMAXPROCS(n)
		for _, c := range []struct {
			precision gomlx.Precision
			want      string
		}{
			{gomlx.Float32, "f81eb8044aa6be6dc5a7205174472631623eaf28257715662c00bb9e3e482c2e"},
			{gomlx.MixedBFloat16, "5eaef4f49af5c0412daef36185a3255706ebfdd1004830b7bef397ed8c5e0c66"},
			{gomlx.MixedFloat16, "7ab1672f9b5c359784a88bc77c08885fb306962c7ec26c65d1070289560fb4d2"},
		} {
			if got := hashOfDigits(t, c.precision); got != c.want {
				t.Errorf("with %d threads and %v the weights have hash %s, want %s", n, c.precision, got, c.want)
			}
			if n != 2 { // the others once
				break
			}
		}
	}
	if runtime.GOARCH != "amd64" || os.Getenv(child) != "" || race.Enabled { // it would take minutes
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

// hashOfDigits trains four steps, and returns the hash of the weights.
func hashOfDigits(t *testing.T, precision gomlx.Precision) string {
	t.Helper()
	trainer := newTrainerOf(t, "go", 2, 64, 1, func(m *gomlx.Model) engine.Model {
		m.Precision = precision
		return m
	}, optimizer.Adam().LearningRate(0.003).Done(), models.CNN{Same: true}.Forward)
	examples := loadDigits(t).Train.Take(4*64).MapRandom(1, data.RandomShift(1))
	if _, err := trainer.Fit(t.Context(), examples.Batch(64), train.FitConfig{}); err != nil {
		t.Fatal(err)
	}
	hash, err := trainer.WeightsHash(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return hash
}
