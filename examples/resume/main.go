// Command resume trains a classifier of handwritten digits and writes snapshots. If it is interrupted or killed, and
// restarted with the same folder, it resumes from the newest snapshot. It ends with the same weights as an
// uninterrupted run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

func main() {
	dir := flag.String("dir", "run1", "folder of the snapshots")
	steps := flag.Int("steps", 0, "stop after this many steps in total (default: after 10 epochs)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *steps); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out io.Writer, dir string, steps int) (err error) {
	engine, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	strategy, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: engine})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, strategy.Close()) }()
	images, err := digits.Load()
	if err != nil {
		return err
	}
	batches := images.Train.Shuffle(1).Batch(64)
	trainer, err := train.New(context.WithoutCancel(ctx), strategy, &gomlx.Model{
		Forward:   models.MLP{Hidden: []int{64}, Classes: images.Classes}.Forward,
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.003).Done(),
	}, train.Config{Data: batches, Seed: 1})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, trainer.Close()) }()
	backup, err := train.NewBackup(trainer, train.BackupConfig{Dir: dir, EverySteps: 50})
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, trainer.Stop) // Ctrl-C: finish the step, write a snapshot, return
	history, err := trainer.Fit(context.WithoutCancel(ctx), batches, train.FitConfig{
		Epochs: 10, Steps: steps, Callbacks: []train.Callback{backup.Callback()},
	})
	if err != nil {
		return err
	}
	hash, err := trainer.WeightsHash(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	if history.Stopped {
		fmt.Fprintln(out, "interrupted: run it again to continue")
	}
	fmt.Fprintf(out, "%d steps, weights %s\n", trainer.Steps(), hash)
	return nil
}
