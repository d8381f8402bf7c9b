package training_test

import (
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/root"
)

func TestMain(m *testing.M) { clitest.Main(m, root.New, root.Run) }
