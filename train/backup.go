package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// BackupConfig configures [NewBackup]: where snapshots are written, and which snapshot to resume from.
type BackupConfig struct {
	// Dir is the folder of the snapshots. It is created if it does not exist. Only the chief uses it. If it
	// is empty, no snapshots are written.
	Dir string
	// EverySteps is the number of steps between two snapshots, counting skipped steps. 0 writes one after
	// every epoch. With DiLoCo a snapshot waits for the next outer step. A snapshot is also written after the last
	// step, even if a callback or [Trainer.Stop] ended training.
	EverySteps int
	// Keep is the number of snapshots to keep; see checkpoint.Config.
	Keep int
	// Resume selects where training starts. ResumeAuto resumes from the newest readable snapshot in Dir, if
	// any, and otherwise starts from the beginning. ResumeNever starts from the beginning. Any other text is
	// the path of a snapshot, or of a folder of snapshots, which must exist.
	//
	// If training does not start from the newest snapshot in Dir, it writes a snapshot immediately, which
	// then is the newest.
	Resume string
	// Job names the job, and Epoch counts its restarts after a failure. A restart resumes from the newest
	// snapshot in Dir if this job wrote it, whatever Resume is. It also takes over the lock of Dir from an
	// earlier start that may still be running. If any other process writes to Dir, opening it is an error.
	Job   string
	Epoch uint32
	// Facts are the names and values of properties that must be equal in a snapshot and in this training: data
	// set, model, optimizer. A snapshot with other facts is rejected.
	Facts []Fact
	// Build holds other properties that affect the bits, such as the engine's version. A difference is
	// reported in [Restored].
	Build []Fact
	// Metadata is stored in snapshots for programs that use the weights, as in the files of [Trainer.Export]: for
	// example, the names of the classes. Nothing compares it.
	Metadata map[string]string
}

// Values of BackupConfig.Resume.
const (
	ResumeAuto  = ""      // resume from the newest readable snapshot, if any; "auto" means the same
	ResumeNever = "never" // start from the beginning
)

// Backup writes snapshots while a [Trainer.Fit] runs, and resumes from one (Keras' BackupAndRestore). With
// several workers, every worker has a Backup. The chief's configuration applies: the chief reads and writes
// files, and sends the state to the others. A Backup must be used from the goroutine that uses its trainer.
type Backup struct {
	t        *Trainer
	cfg      BackupConfig
	saves    bool                // the chief has a folder
	inParts  bool                // all workers write snapshots, each a part
	every    int                 // the chief's EverySteps
	manager  *checkpoint.Manager // on the chief; nil: nothing is written here
	restored bool
	last     moment // last saved or restored
	due      bool   // a snapshot is due, with DiLoCo after the next outer step
}

// moment identifies a state of training.
type moment struct {
	committed, passes int64
	position          fitPosition
}

// NewBackup returns a Backup for t. It does not access files. The caller must call [Backup.Close].
func NewBackup(t *Trainer, cfg BackupConfig) (*Backup, error) {
	if cfg.EverySteps < 0 {
		return nil, fmt.Errorf("train: BackupConfig.EverySteps is %d: want at least 1, or 0 for a snapshot after every epoch",
			cfg.EverySteps)
	}
	return &Backup{t: t, cfg: cfg, saves: cfg.Dir != "", every: cfg.EverySteps}, nil
}

// Callback returns the callback for [Trainer.Fit]. When training begins, it calls [Backup.Restore] unless the
// program has done so. If a snapshot cannot be written, training ends: Fit returns the cause on the chief,
// and the chief's failure on the other workers.
func (b *Backup) Callback() Callback {
	return Callback{
		last: true,
		OnTrainBegin: func(ctx context.Context) error {
			if b.restored {
				return nil
			}
			_, err := b.Restore(ctx)
			return err
		},
		OnStepEnd: func(ctx context.Context, _ Step) error {
			if b.every > 0 && b.t.fitting.Load().history.Steps%b.every == 0 {
				b.due = true
			}
			if b.t.partsWritten() {
				if err := b.finishParts(ctx); err != nil {
					return err
				}
			}
			return b.saveIfDue(ctx)
		},
		OnEpochEnd: func(ctx context.Context, _ Epoch) error {
			b.due = b.due || b.every == 0
			return b.saveIfDue(ctx)
		},
		OnTrainDone: func(ctx context.Context, _ *History) error {
			if err := b.Save(ctx); err != nil {
				return err
			}
			return errors.Join(b.finishParts(ctx), b.wait())
		},
		OnTrainEnd: func(context.Context, *History, error) { // the error is already reported
			b.dropParts()
			_ = b.wait()
		},
	}
}

// saveIfDue saves if a snapshot is due and the workers' parameters are equal.
func (b *Backup) saveIfDue(ctx context.Context) error {
	if !b.due || b.t.diloco.checkEqual() != nil {
		return b.failed()
	}
	b.due = false
	return b.Save(ctx)
}

// Save writes a snapshot of the current state, unless it is already saved. It returns once the state is
// copied and the previous snapshot is written; the new one is written in the background. The error may be
// that of an earlier snapshot. With several workers, every worker calls it. If the optimizer is sharded and all
// workers have the chief's folder, each writes the variables that it updates; outside of Fit, Save then waits for all.
func (b *Backup) Save(ctx context.Context) error {
	now := b.t.moment()
	if !b.saves || now == b.last {
		return b.failed()
	}
	return b.save(ctx, now)
}

func (b *Backup) save(ctx context.Context, now moment) error {
	if b.inParts {
		b.last = now
		err := b.startParts(ctx)
		if err == nil && b.t.fitting.Load() == nil {
			err = b.finishParts(ctx)
		}
		return err
	}
	s, err := b.t.Snapshot(ctx)
	if err != nil {
		return err
	}
	b.last = now
	if b.manager == nil {
		return nil
	}
	c, err := b.contents(s)
	if err != nil {
		return err
	}
	return b.stopIfFailed(b.manager.Start(c))
}

// contents completes a snapshot by the configuration, and converts it.
func (b *Backup) contents(s *Snapshot) (*checkpoint.Contents, error) {
	s.Facts, s.Build, s.Job, s.Metadata = b.cfg.Facts, b.cfg.Build, b.cfg.Job, b.cfg.Metadata
	return s.Contents()
}

// failed returns the error of the first snapshot that could not be written.
func (b *Backup) failed() error {
	if b.manager == nil {
		return nil
	}
	return b.stopIfFailed(b.manager.Err())
}

// wait waits until all snapshots are on the disk.
func (b *Backup) wait() error {
	if b.manager == nil {
		return nil
	}
	return b.stopIfFailed(b.manager.Wait())
}

// Close waits for the save in progress and unlocks the folder, which the chief has locked since Restore. The
// operating system also unlocks it when the process ends. Close returns the first error of all saves.
func (b *Backup) Close() error {
	b.dropParts()
	if b.manager == nil {
		return nil
	}
	return b.stopIfFailed(b.manager.Close())
}

func (b *Backup) stopIfFailed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("train: training stops because it could not be resumed: %w", err)
}

// moment identifies the trainer's current state.
func (t *Trainer) moment() moment {
	m := moment{committed: t.committed, passes: t.passes}
	if s := t.resume; s != nil {
		m.position = s.position()
	} else if f := t.fitting.Load(); f != nil {
		m.position = f.position
	}
	return m
}

// Restore restores the snapshot that BackupConfig.Resume selects, if any, with [Trainer.Restore], and locks
// and prepares the folder for new snapshots. With several workers, every worker calls it. If another process
// writes to the folder, the error matches *checkpoint.LockedError on the chief.
func (b *Backup) Restore(ctx context.Context) (Restored, error) {
	var s *Snapshot
	b.t.enter(PhaseRestore)
	message := restoreMessage{Saves: b.saves, Every: b.every}
	var failure error
	if b.t.IsChief() {
		if s, message.Restored, failure = b.find(); failure != nil {
			if e := b.folder(); e != nil {
				failure = e
			} else {
				failure = &SnapshotError{failure}
			}
		} else {
			failure = b.open()
		}
		if failure == nil && b.saves && b.t.Sharded() {
			message.Holder, _ = checkpoint.ReadHolder(b.cfg.Dir) // unknown on a full disk
		}
		if failure == nil && b.saves {
			message.Anew, failure = newerIn(b.cfg.Dir, message.Restored.Path)
		}
	}
	s, message, err := b.t.snapshotFromChief(ctx, s, message, failure)
	if err != nil {
		return Restored{}, err
	}
	chosen := message.Restored
	b.saves, b.every, b.restored = message.Saves, message.Every, true
	if err := b.findWriters(ctx, message.Holder); err != nil {
		return Restored{}, err
	}
	var r Restored
	if s != nil {
		if r, err = b.t.restore(s); err != nil {
			return Restored{}, &SnapshotError{fmt.Errorf("%w (%s)", err, chosen.Path)}
		}
		r.Path, r.Refused, r.Differ = chosen.Path, chosen.Refused, append(r.Differ, chosen.Differ...)
	}
	if b.last = b.t.moment(); message.Anew {
		err = b.save(ctx, b.last)
	}
	return r, err
}

// SnapshotError is an error of [Backup.Restore] about the snapshot to resume from: it cannot be read, or it belongs to
// another training. Training can start without it.
type SnapshotError struct{ Err error }

// Error implements error.
func (e *SnapshotError) Error() string { return e.Err.Error() }

// Unwrap returns the underlying error.
func (e *SnapshotError) Unwrap() error { return e.Err }

// newerIn reports whether the folder has snapshots of which the one at path is not the newest.
func newerIn(dir, path string) (bool, error) {
	all, err := checkpoint.List(dir)
	if len(all) == 0 || err != nil || path == "" {
		return len(all) > 0, err
	}
	newest, err := os.Stat(all[len(all)-1])
	if err != nil {
		return false, err
	}
	from, err := os.Stat(path)
	return err == nil && !os.SameFile(newest, from), err
}

// folder creates the folder of the snapshots, if one is configured, and checks that it can be read.
func (b *Backup) folder() error {
	if b.cfg.Dir == "" {
		return nil
	}
	err := os.MkdirAll(b.cfg.Dir, 0o777)
	if err == nil {
		_, err = os.ReadDir(b.cfg.Dir)
	}
	if err != nil {
		return fmt.Errorf("train: the folder of the snapshots: %w", err)
	}
	return nil
}

func (b *Backup) open() (err error) {
	if b.cfg.Dir == "" || b.manager != nil {
		return nil
	}
	if err := b.folder(); err != nil {
		return err
	}
	b.manager, err = checkpoint.Open(checkpoint.Config{
		Dir: b.cfg.Dir, Keep: b.cfg.Keep, Job: b.cfg.Job,
		Epoch: b.cfg.Epoch,
	})
	return err
}

// find reads the snapshot to resume from, if any.
func (b *Backup) find() (*Snapshot, Restored, error) {
	var on *checkpoint.Snapshot
	var refused []error
	var err error
	resume := b.cfg.Resume
	reader := checkpoint.Reader{}
	if report := b.t.config.Progress; report != nil {
		reader.Progress = func() { report(b.t.committed+1, PhaseRestore) }
	}
	if b.cfg.Epoch > 0 && b.cfg.Dir != "" {
		if s, _, err := reader.Latest(b.cfg.Dir); err != nil {
			return nil, Restored{}, err
		} else if s != nil && writtenBy(s, b.cfg.Job) {
			resume = ResumeAuto
		}
	}
	switch resume {
	case ResumeNever:
	case ResumeAuto, "auto":
		if b.cfg.Dir != "" {
			on, refused, err = reader.Latest(b.cfg.Dir)
		}
	default:
		on, refused, err = reader.Find(resume)
	}
	if on == nil || err != nil {
		return nil, Restored{}, err
	}
	r := Restored{Path: on.Path}
	for _, err := range refused {
		r.Refused = append(r.Refused, err.Error())
	}
	s, err := SnapshotOf(&on.Contents)
	if err != nil {
		return nil, r, fmt.Errorf("%w (%s)", err, on.Path)
	}
	if differ := differences(s.Facts, b.cfg.Facts); differ != nil {
		return nil, r, fmt.Errorf("train: the snapshot %s is of another training: %s", on.Path, strings.Join(differ, "; "))
	}
	r.Differ = differences(s.Build, b.cfg.Build)
	return s, r, nil
}

// writtenBy reports whether the job wrote the snapshot.
func writtenBy(on *checkpoint.Snapshot, job string) bool {
	s, err := SnapshotOf(&on.Contents)
	return err == nil && s.Job == job
}

// differences describes the facts that differ between a snapshot and this training.
func differences(then, now []Fact) (out []string) {
	was := map[string]string{}
	for _, f := range then {
		was[f.Name] = f.Value
	}
	for _, f := range now {
		if value, known := was[f.Name]; !known {
			out = append(out, fmt.Sprintf("it does not record its %s, this training has %s", f.Name, f.Value))
		} else if value != f.Value {
			out = append(out, fmt.Sprintf("its %s is %s, here it is %s", f.Name, value, f.Value))
		}
		delete(was, f.Name)
	}
	for _, f := range then {
		if value, left := was[f.Name]; left {
			out = append(out, fmt.Sprintf("its %s is %s, this training has none", f.Name, value))
		}
	}
	return out
}
