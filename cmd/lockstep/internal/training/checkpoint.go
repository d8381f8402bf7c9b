package training

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// checkpointFlags are the snapshot flags of lockstep train.
type checkpointFlags struct {
	dir             string
	saveEvery, keep int
	resume          string
}

func (o *checkpointFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.dir, "checkpoint-dir", "", "`folder` of snapshots, to resume from")
	f.IntVar(&o.saveEvery, "save-every", 0, "steps between two (default an epoch)")
	f.IntVar(&o.keep, "keep", 3, "snapshots to keep; -1: all")
	f.StringVar(&o.resume, "resume", "auto", "auto, never, or the `path` of snapshots")
	cli.Limit(f, "[1,)", "save-every")
	cli.NotCompared(f, "checkpoint-dir", "save-every", "keep", "resume") // the chief decides
}

func (o *checkpointFlags) check(given func(flag string) bool) error {
	for _, flag := range []string{"save-every", "keep"} {
		if given(flag) && o.dir == "" {
			return cli.Usagef("--%s needs --checkpoint-dir, the folder of the snapshots", flag)
		}
	}
	switch {
	case given("checkpoint-dir") && o.dir == "":
		return cli.Usagef("--checkpoint-dir is empty: want the name of a folder")
	case o.keep < 1 && o.keep != -1:
		return cli.Usagef("--keep %d: want at least 1, or -1 for all", o.keep)
	case o.resume == "":
		return cli.Usagef("--resume is empty: want auto, never, or a path")
	}
	return nil
}

// wanted reports whether the run writes snapshots or may resume from one.
func (o *checkpointFlags) wanted() bool {
	return o.dir != "" || o.resume != "auto" && o.resume != train.ResumeNever
}

// snapshots holds the snapshot state of a run.
type snapshots struct {
	backup   *train.Backup // nil: no snapshots are written, and the run did not resume
	restored train.Restored
}

// resume restores a snapshot, if there is one, and prepares for new ones. All workers of a job must call it,
// because the chief decides for all.
func (r *trainRun) resume(ctx context.Context) (err error) {
	o := &r.flags.checkpoint
	if !o.wanted() && !r.Strategy.Properties().InMultiWorkerMode {
		return nil
	}
	cfg := train.BackupConfig{Dir: o.dir, EverySteps: o.saveEvery, Keep: o.keep, Resume: o.resume, Metadata: r.metadata}
	if r.Config.Job != nil {
		cfg.Job, cfg.Epoch = r.Config.Job.ID, r.Config.Job.Epoch
	}
	if o.wanted() {
		if cfg.Facts, err = r.facts(ctx); err != nil {
			return err
		}
		cfg.Build = r.build()
	}
	if r.backup, err = train.NewBackup(r.Trainer, cfg); err != nil {
		return err
	}
	r.restored, err = r.backup.Restore(ctx)
	switch locked := (*checkpoint.LockedError)(nil); {
	case errors.As(err, &locked):
		return fmt.Errorf("--checkpoint-dir: %w", err)
	case err != nil && !r.chief:
		return err // the chief's error has the details
	case err != nil && !errors.As(err, new(*train.SnapshotError)):
		return fmt.Errorf("--checkpoint-dir %s: %w", o.dir, err)
	case err != nil:
		hint := ""
		if strings.Contains(err.Error(), "its data is ") {
			hint = "\nthe hash of the data covers the contents of the files and how they are read; another version of " +
				"lockstep may compute another one of the same data (its CHANGELOG says so)"
		}
		return fmt.Errorf("%w%s\nto start over, give --resume never; to load only the weights, give --weights", err, hint)
	}
	return nil
}

// facts returns the properties that a snapshot and this run must share.
func (r *trainRun) facts(ctx context.Context) ([]train.Fact, error) {
	hash, err := hashOf(ctx, r.set.Train)
	if err != nil {
		return nil, fmt.Errorf("reading the training %s: %w", r.set.Unit, err)
	}
	f := &r.flags
	return []train.Fact{
		{Name: "data", Value: fmt.Sprintf("%s, %s training %s, hashed %.16s", f.Data.Name, cli.Grouped(r.set.Train.Len()),
			r.set.Unit, hash)},
		{Name: "shift", Value: fmt.Sprint(f.Data.Shift)},
		{Name: "validation split", Value: fmt.Sprint(f.Data.ValidationSplit)},
		{Name: "model", Value: f.Model},
		{Name: "optimizer", Value: f.optimizer},
		{Name: "clipping", Value: fmt.Sprintf("norm %v, value %v", f.clipNorm, f.clipValue)},
		{Name: "learning rate", Value: fmt.Sprintf("%v (%s)", f.learningRate, f.schedule)},
	}, nil
}

// build returns the other properties that the bits depend on.
func (r *trainRun) build() []train.Fact {
	out := []train.Fact{
		{Name: "engine", Value: r.Engine.Description()},
		{Name: "processor", Value: runtime.GOARCH + " with " + machine.Vectors()},
	}
	if r.flags.schedule != "constant" {
		length := cli.Count(r.flags.epochs, "epoch")
		if r.flags.epochs < 0 {
			length = cli.Count(r.flags.steps, "step")
		}
		out = append(out, train.Fact{Name: "length of the learning-rate schedule", Value: length})
	}
	return out
}

// closeSnapshots releases the lock on the folder.
func (r *trainRun) closeSnapshots() error {
	if r.backup == nil {
		return nil
	}
	return r.backup.Close()
}

// announceSnapshots adds the rows about the restored snapshot and the folder of new ones.
func (r *trainRun) announceSnapshots(t *cli.Table) {
	o := &r.flags.checkpoint
	for _, text := range r.restored.Refused {
		t.Row("refused", "%s", text)
	}
	if s := r.restored; s.Found {
		at := ""
		if s.EpochAt > 0 {
			at = " and " + cli.Count(s.EpochAt, "step")
		}
		t.Row("resumed", "from %s: after %s (%s%s)", s.Path, cli.Count(int(s.Step), "step"), cli.Count(s.Epoch, "epoch"), at)
		for _, text := range s.Differ {
			t.Row("bits differ", "from those of an uninterrupted training: %s", text)
		}
	}
	if o.dir == "" {
		return
	}
	every := "epoch"
	if o.saveEvery > 0 {
		every = cli.Count(o.saveEvery, "step")
	}
	t.Row("snapshots", "in %s, every %s", filepath.Clean(o.dir), every)
}

// backups returns the callback that writes snapshots, if there is one.
func (r *trainRun) backups() []train.Callback {
	if r.backup == nil {
		return nil
	}
	return []train.Callback{r.backup.Callback()}
}
