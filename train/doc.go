// Package train implements Keras' fit, evaluate and predict for any strategy.
//
// A [Trainer] trains one model over one strategy. The strategy determines the number of replicas and
// their devices; the model determines what they compute. The trainer splits every global batch into one share
// per replica and computes the replicas' gradients in parallel. It all-reduces the gradients and applies the
// sum on every replica. Loss and metrics are weighted by example, so they mean the same on one replica and on
// eight:
//
//	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: eng})
//	batches := images.Shuffle(1).Batch(128)
//	t, err := train.New(ctx, s, model, train.Config{Data: batches})
//	history, err := t.Fit(ctx, batches, train.FitConfig{Epochs: 10, Callbacks: []train.Callback{
//		train.NewProgress(train.ProgressConfig{Out: os.Stdout}),
//	}})
//	result, err := t.Evaluate(ctx, testImages.Batch(128))
//
// Keras' model.compile and model.fit are [New] and [Trainer.Fit]. validation_split is data.Pipeline.Split,
// BackupAndRestore is [NewBackup], and ModelCheckpoint is [NewModelCheckpoint]. train_on_batch is
// [Trainer.Gradients] followed by [Trainer.ApplyGradients].
//
// # Batches
//
// Datasets yield global batches ([data.Batch]) of at most Config.GlobalBatch examples. With n replicas,
// replica i gets the examples [i*per, (i+1)*per), where per = ceil(GlobalBatch/n). If a batch holds fewer
// examples, the last replicas get fewer or none, and compute on padding of weight 0. The loss of a batch is
// the weighted mean over its examples, however they are divided among the replicas. A batch whose weights add
// up to 0 changes no variable.
//
// # Steps
//
// Steps are atomic. New values become visible on all replicas after every replica has computed and reduced
// everything. If anything fails on any replica, or the context ends, every variable keeps its old value on
// every replica of this worker.
//
// # Reproducibility
//
// Weights depend only on the model, the seed, the data, the number of replicas, the build of the engine and the
// vector instructions of the CPU: the same command run twice gives the same [Trainer.WeightsHash]. Another number of
// replicas adds in another order, so the last digits differ.
//
// # Resuming
//
// A [Snapshot] holds the bits of every replica and the position of Fit. A [Backup] writes snapshots while Fit
// runs. A training that resumes from a snapshot ends with the same weights and history as an uninterrupted
// one.
//
// # Several workers
//
// With a multi-worker strategy, every worker creates a trainer with the same model and configuration, and
// calls the same methods with the same data. The data yield global batches, of which each worker computes the
// shares of its replicas. It reads only their rows if the dataset can read them separately (data.RowReader). All
// workers start from the chief's values and stop after the same step
// ([Trainer.Stop]). The resulting bits are those of one worker with as many replicas. If workers differ in
// the model, in the data or in a variable that was set between steps, all of them get an error. It comes from New,
// or from the step, which then changes nothing. Of functions that change examples, and of files, a sample is
// compared if workers read only their rows: one row a step.
//
// Package engine defines how a model computes. Packages distribute and collective define how replicas
// communicate.
package train
