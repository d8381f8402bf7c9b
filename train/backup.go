package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// BackupConfig says where snapshots are kept, and what is done with those that are there.
type BackupConfig struct {
	// Dir is the folder of the snapshots. It is made if it is not there. Only the chief's machine must have it. Empty: none are written.
	Dir string
	// EverySteps is how many steps come between two snapshots, skipped ones included; 0: one is written after every epoch. There is one
	// after the last step as well, also where a callback or [Trainer.Stop] has ended training.
	EverySteps int
	// Keep is how many snapshots stay; see checkpoint.Config.
	Keep int
	// Resume says where training goes on: ResumeAuto at the newest good snapshot in Dir, if there is one, and else at the beginning;
	// ResumeNever at the beginning; any other text is the path of a snapshot, or of a folder of them, that must be there.
	//
	// Where it does not go on at the newest one in Dir, a snapshot is written at once, so that this is the newest from now on.
	Resume string
	// Job names the job, and Epoch counts its restarts after a failure: then it goes on at the newest snapshot in Dir, if that is its own, whatever
	// Resume says, and takes Dir over from an earlier start that may still run somewhere. Any other process that writes there is refused.
	Job   string
	Epoch uint32
	// Facts are what a snapshot's training must have had in common with this one: its data set, its model, its optimizer. Others are
	// refused.
	Facts []Fact
	// Build is what bits depend on besides: the engine's version, say. A difference is told ([Restored]).
	Build []Fact
}

// The words of BackupConfig.Resume.
const (
	ResumeAuto  = "" // or "auto"
	ResumeNever = "never"
)

// Backup writes snapshots while a [Trainer.Fit] runs, and goes on from one (Keras' BackupAndRestore). With several workers all have one:
// the chief's configuration counts; it writes and reads, and the others learn from it.
type Backup struct {
	t        *Trainer
	cfg      BackupConfig
	saves    bool                // the chief has a folder
	every    int                 // the chief's EverySteps
	manager  *checkpoint.Manager // the chief's; nil: nothing is written here
	restored bool
	last     moment // that is saved, or was restored
}

// moment tells two states of training apart.
type moment struct {
	committed, passes int64
	epoch, step       int
	next              place
	cut               bool
}

// NewBackup returns a Backup for t. It touches no file.
func NewBackup(t *Trainer, cfg BackupConfig) (*Backup, error) {
	if cfg.EverySteps < 0 {
		return nil, fmt.Errorf("train: BackupConfig.EverySteps is %d: want at least 1, or 0 for a snapshot after every epoch", cfg.EverySteps)
	}
	return &Backup{t: t, cfg: cfg, saves: cfg.Dir != "", every: cfg.EverySteps}, nil
}

// Callback returns what [Trainer.Fit] is given. It calls [Backup.Restore] as training begins, if nobody has before. A snapshot that
// cannot be written ends training: the chief's Fit returns why, and the other workers' that it did.
func (b *Backup) Callback() Callback {
	return Callback{
		OnTrainBegin: func(ctx context.Context) error {
			if b.restored {
				return nil
			}
			_, err := b.Restore(ctx)
			return err
		},
		OnStepEnd: func(ctx context.Context, _ Step) error {
			if b.every > 0 && b.t.fitting.history.Steps%b.every == 0 {
				return b.Save(ctx)
			}
			return b.failed()
		},
		OnEpochEnd: func(ctx context.Context, _ Epoch) error {
			if b.every > 0 {
				return b.failed()
			}
			return b.Save(ctx)
		},
		OnTrainDone: func(ctx context.Context, _ *History) error { return errors.Join(b.Save(ctx), b.wait()) },
		OnTrainEnd:  func(context.Context, *History, error) { _ = b.wait() }, // of an earlier failure
	}
}

// Save writes a snapshot of this moment, if it is not saved already. It returns when the state is copied, and the snapshot before is
// written; an error may be that one's. Every worker calls it.
func (b *Backup) Save(ctx context.Context) error {
	now := b.t.moment()
	if !b.saves || now == b.last {
		return b.failed()
	}
	return b.save(ctx, now)
}

func (b *Backup) save(ctx context.Context, now moment) error {
	s, err := b.t.Snapshot(ctx)
	if err != nil {
		return err
	}
	b.last = now
	if b.manager == nil {
		return nil
	}
	s.Facts, s.Build, s.Job = b.cfg.Facts, b.cfg.Build, b.cfg.Job
	c, err := s.Contents()
	if err != nil {
		return err
	}
	return b.told(b.manager.Start(c))
}

// failed returns the error of a snapshot that could not be written.
func (b *Backup) failed() error {
	if b.manager == nil {
		return nil
	}
	return b.told(b.manager.Err())
}

// wait waits until all snapshots are on the disk.
func (b *Backup) wait() error {
	if b.manager == nil {
		return nil
	}
	return b.told(b.manager.Wait())
}

// Close waits for the save in progress, and lets others write into the folder, which the chief has locked since Restore. The end of the
// process does so as well.
func (b *Backup) Close() error {
	if b.manager == nil {
		return nil
	}
	return b.told(b.manager.Close())
}

func (b *Backup) told(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("train: training stops, for it could not be resumed: %w", err)
}

// moment returns what the trainer's state is the state of.
func (t *Trainer) moment() moment {
	m := moment{committed: t.committed, passes: t.passes}
	if s := t.resume; s != nil {
		m.epoch, m.step, m.next, m.cut = s.Epoch, s.Step, place{s.Pass, s.Batch}, s.Cut
	} else if f := t.fitting; f != nil {
		m.epoch, m.step, m.next, m.cut = f.stand.epoch, f.stand.step, f.stand.next, f.stand.cut
	}
	return m
}

// Restore goes on from the snapshot that BackupConfig.Resume names, if it names one, by [Trainer.Restore], and makes the folder ready for
// new ones. Every worker calls it.
func (b *Backup) Restore(ctx context.Context) (Restored, error) {
	var s *Snapshot
	b.t.at(PhaseRestore)
	message := shared{Saves: b.saves, Every: b.every}
	var failure error
	if b.t.strategy.Properties().ShouldCheckpoint {
		if s, message.Restored, failure = b.find(); failure != nil {
			if e := b.folder(); e != nil {
				failure = e
			} else {
				failure = &SnapshotError{failure}
			}
		} else {
			failure = b.open()
		}
		if failure == nil && b.saves {
			message.Anew, failure = newerIn(b.cfg.Dir, message.Restored.Path)
		}
	}
	s, message, err := b.t.share(ctx, s, message, failure)
	if err != nil {
		return Restored{}, err
	}
	said := message.Restored
	b.saves, b.every, b.restored = message.Saves, message.Every, true
	var r Restored
	if s != nil {
		if r, err = b.t.restore(s); err != nil {
			return Restored{}, &SnapshotError{fmt.Errorf("%w (%s)", err, said.Path)}
		}
		r.Path, r.Refused, r.Differ = said.Path, said.Refused, append(r.Differ, said.Differ...)
	}
	if b.last = b.t.moment(); message.Anew {
		err = b.save(ctx, b.last)
	}
	return r, err
}

// SnapshotError is an error of [Backup.Restore] about the snapshot to go on from: it cannot be read, or is of another
// training. Without it training could begin.
type SnapshotError struct{ Err error }

// Error implements error.
func (e *SnapshotError) Error() string { return e.Err.Error() }

// Unwrap returns what is wrong with the snapshot.
func (e *SnapshotError) Unwrap() error { return e.Err }

// newerIn reports whether a folder has snapshots, and that at path is not the newest.
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

// folder makes the folder of the snapshots, if there is to be one, and holds that it can be read.
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
	b.manager, err = checkpoint.Open(checkpoint.Config{Dir: b.cfg.Dir, Keep: b.cfg.Keep, Job: b.cfg.Job, Epoch: b.cfg.Epoch})
	return err
}

// find reads the snapshot to go on from, if there is one.
func (b *Backup) find() (*Snapshot, Restored, error) {
	var on *checkpoint.Snapshot
	var refused []error
	var err error
	resume := b.cfg.Resume
	if b.cfg.Epoch > 0 && b.cfg.Dir != "" {
		if s, _, err := checkpoint.Latest(b.cfg.Dir); err != nil {
			return nil, Restored{}, err
		} else if s != nil && writtenBy(s, b.cfg.Job) {
			resume = ResumeAuto
		}
	}
	switch resume {
	case ResumeNever:
	case ResumeAuto, "auto":
		if b.cfg.Dir != "" {
			on, refused, err = checkpoint.Latest(b.cfg.Dir)
		}
	default:
		on, refused, err = checkpoint.Find(resume)
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

// writtenBy reports whether a job has written a snapshot.
func writtenBy(on *checkpoint.Snapshot, job string) bool {
	s, err := SnapshotOf(&on.Contents)
	return err == nil && s.Job == job
}

// differences says which facts differ between a snapshot and this training.
func differences(then, now []Fact) (out []string) {
	was := map[string]string{}
	for _, f := range then {
		was[f.Name] = f.Value
	}
	for _, f := range now {
		if value, known := was[f.Name]; !known {
			out = append(out, fmt.Sprintf("it does not say its %s, this one has %s", f.Name, f.Value))
		} else if value != f.Value {
			out = append(out, fmt.Sprintf("its %s is %s, here it is %s", f.Name, value, f.Value))
		}
		delete(was, f.Name)
	}
	for _, f := range then {
		if value, left := was[f.Name]; left {
			out = append(out, fmt.Sprintf("its %s is %s, here there is none", f.Name, value))
		}
	}
	return out
}
