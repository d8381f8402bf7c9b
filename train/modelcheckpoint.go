package train

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// Export writes the weights ([Trainer.Weights]) atomically to a safetensors file. The file is for other
// programs; to resume training, use a [Snapshot]. Every worker calls it, and the chief writes. metadata may
// be nil.
func (t *Trainer) Export(ctx context.Context, path string, metadata map[string]string) error {
	weights, err := t.Weights(ctx)
	if err != nil || !t.IsChief() {
		return err
	}
	return checkpoint.Save(path, tensorsOf(weights), metadata)
}

// ModelCheckpointConfig configures [NewModelCheckpoint].
type ModelCheckpointConfig struct {
	// Path is the file's name, with optional placeholders: {epoch} is the epoch, from 1, {step} is the number
	// of all steps, and {loss}, {accuracy}, {val_loss}, … are loss and metrics. A format may follow, as in
	// {epoch:03d} and {val_loss:.2f}. Without placeholders, each epoch's file replaces the previous one.
	Path string
	// BestOnly writes an epoch's weights only if Monitor is better than in all earlier epochs, including
	// those before a restore.
	BestOnly bool
	// Monitor is the loss or metric by which epochs are compared. Default: "val_loss".
	Monitor string
	// Mode specifies whether a smaller or a larger value of Monitor is better.
	Mode Mode
	// Metadata is stored in the files, as by [Trainer.Export], beside the numbers that placeholders can name.
	Metadata map[string]string
}

// NewModelCheckpoint returns a callback that writes the weights after every epoch (Keras' ModelCheckpoint
// with save_weights_only), or with FitConfig.ValidateEvery after every validation between steps. With FitConfig.EMA it
// writes the moving averages. Every worker needs the callback. Fit fails at its start if Path or Monitor names a
// number that will not exist.
func NewModelCheckpoint(t *Trainer, cfg ModelCheckpointConfig) (Callback, error) {
	if cfg.Path == "" {
		return Callback{}, fmt.Errorf("train: ModelCheckpointConfig.Path is empty: want the name of a file")
	}
	m := &monitor{t: t, of: "ModelCheckpointConfig", name: cfg.Monitor, mode: cfg.Mode}
	if !cfg.BestOnly {
		m.name = "loss"
	}
	return m.watch(func() error {
		return cfg.check(t.fitting.Load().known())
	}, func(ctx context.Context, _ int, p point, now bool) error {
		if best := m.improves(p); !now || cfg.BestOnly && !best {
			return nil
		}
		numbers, f := maps.Clone(p.numbers), t.fitting.Load()
		numbers["epoch"], numbers["step"] = float64(p.epoch+1), float64(f.history.Steps)
		path, err := fillIn(cfg.Path, numbers)
		if err != nil {
			return fmt.Errorf("train: ModelCheckpointConfig.Path %s: %w", cfg.Path, err)
		}
		metadata := map[string]string{}
		maps.Copy(metadata, cfg.Metadata)
		for name, x := range numbers {
			metadata[name] = strconv.FormatFloat(x, 'g', -1, 64)
		}
		export := func() error { return t.Export(ctx, path, metadata) }
		if f.cfg.EMA {
			return t.WithEMA(ctx, export)
		}
		return export()
	}), nil
}

// check returns an error if Path needs a number that will not exist.
func (c *ModelCheckpointConfig) check(known map[string]bool) error {
	known["epoch"], known["step"] = true, true
	for _, m := range placeholder.FindAllStringSubmatch(c.Path, -1) {
		if there, ok := known[m[1]]; !ok {
			return fmt.Errorf("train: ModelCheckpointConfig.Path %s: no number is named %s: want one of %s",
				c.Path, m[1], strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		} else if !there {
			return fmt.Errorf("train: ModelCheckpointConfig.Path %s: %s does not exist, because "+
				"FitConfig.Validation is not set", c.Path, m[1])
		}
	}
	return nil
}

var placeholder = regexp.MustCompile(`\{([A-Za-z_][A-Za-z_0-9]*)(?::(0?[0-9]*d|\.[0-9]+f))?\}`)

// fillIn replaces the placeholders of path with numbers.
func fillIn(path string, numbers map[string]float64) (string, error) {
	var err error
	out := placeholder.ReplaceAllStringFunc(path, func(text string) string {
		m := placeholder.FindStringSubmatch(text)
		x, ok := numbers[m[1]]
		switch {
		case !ok:
			err = fmt.Errorf("no number is named %s", m[1])
			return text
		case strings.HasSuffix(m[2], "d"):
			return fmt.Sprintf("%"+m[2], int64(x))
		case m[2] != "":
			return fmt.Sprintf("%"+m[2], x)
		}
		return strconv.FormatFloat(x, 'g', -1, 64)
	})
	return out, err
}
