package checkpoint

import (
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// BenchmarkSnapshot writes and reads snapshots of 64 MiB, and copies as many bytes in memory, which is the part that
// training waits for.
func BenchmarkSnapshot(b *testing.B) {
	weights := tensor.New(tensor.Float32, 16<<20)
	c := &Contents{Tensors: []Tensor{{"weights", weights}}}
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(64 << 20)
		for b.Loop() {
			weights.Clone()
		}
	})
	dir := b.TempDir()
	b.Run("save", func(b *testing.B) {
		b.SetBytes(64 << 20)
		m := open(b, Config{Dir: dir, Keep: 1})
		for b.Loop() {
			if err := m.Save(c); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("read", func(b *testing.B) {
		b.SetBytes(64 << 20)
		paths, err := List(dir)
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := ReadSnapshot(paths[0]); err != nil {
				b.Fatal(err)
			}
		}
	})
}
