package gomlx

import (
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// slowLayers collects the GoMLX layers of a model that are slow on the Go backend. Its methods may be called
// concurrently.
type slowLayers struct {
	mu    sync.Mutex
	notes map[string]bool
}

// slowOnGo lists GoMLX's layers for which package layer has faster ones, by the prefix of their functions' names.
var slowOnGo = []struct{ prefix, name, instead string }{
	{"github.com/gomlx/gomlx/ml/layers.Dense", "layers.Dense", "layer.Dense"},
	{"github.com/gomlx/gomlx/ml/layers.(*ConvBuilder).", "layers.Convolution", "layer.Conv2D"},
	{"github.com/gomlx/gomlx/ml/layers/activation.Gelu", "activation.Gelu", "layer.Gelu"},
	{"github.com/gomlx/gomlx/ml/layers/norm.(*LayerNormBuilder).", "norm.LayerNorm", "layer.LayerNorm"},
	{"github.com/gomlx/gomlx/ml/layers/attention.", "attention.MultiHeadAttention", "layer.SelfAttention"},
}

// note records the outermost GoMLX layer that is building an operation, unless a layer of this project calls it.
func (s *slowLayers) note() {
	pcs := make([]uintptr, 128)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	text := ""
	for more := true; more; {
		var f runtime.Frame
		if f, more = frames.Next(); strings.HasPrefix(f.Function, "github.com/lockstep-ml/lockstep/engine/gomlx/layer.") {
			return
		}
		for _, l := range slowOnGo {
			if strings.HasPrefix(f.Function, l.prefix) {
				text = "GoMLX's " + l.name + " is slow on the Go engine: use " + l.instead +
					" of github.com/lockstep-ml/lockstep/engine/gomlx/layer"
			}
		}
	}
	if text == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.notes == nil {
		s.notes = map[string]bool{}
	}
	s.notes[text] = true
}

// list returns the notes, sorted.
func (s *slowLayers) list() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.notes))
}
