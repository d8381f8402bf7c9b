package train_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/train"
)

// TestAdviceIsLogged checks that a trainer logs which layers of a model are slow on the engine.
func TestAdviceIsLogged(t *testing.T) {
	m := masked()
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
		return []*graph.Node{layers.Dense(s, in[0], true, 5)}
	}
	var log bytes.Buffer
	newNumbers(t, m, train.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if want := "GoMLX's layers.Dense is slow on the Go engine: use layer.Dense"; !strings.Contains(log.String(), want) {
		t.Errorf("the log is %q, want it to contain %q", log.String(), want)
	}
}
