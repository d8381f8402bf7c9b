// Package train is Keras' fit, evaluate and predict over any strategy.
//
// A [Trainer] joins a strategy (how many replicas, on which devices) with a model (what they compute). It cuts every global
// batch into one share per replica, runs the replicas' gradients in parallel, reduces them, applies the sum on every
// replica, and combines loss and metrics by example, so that the numbers mean the same on one replica and on eight:
//
//	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: eng})
//	batches := images.Shuffle(1).Batch(128)
//	t, err := train.New(ctx, s, model, train.Config{Data: batches})
//	history, err := t.Fit(ctx, batches, train.FitConfig{Epochs: 10, Callbacks: []train.Callback{
//		train.NewProgress(train.ProgressConfig{Out: os.Stdout}),
//	}})
//	result, err := t.Evaluate(ctx, testImages.Batch(128))
//
// What Keras calls model.compile and model.fit is here [New] and [Trainer.Fit]; validation_split is data.Pipeline.Split,
// BackupAndRestore is [NewBackup], ModelCheckpoint [NewModelCheckpoint], and train_on_batch is [Trainer.Gradients] with
// [Trainer.ApplyGradients].
//
// # Batches
//
// Datasets yield global batches ([data.Batch]) of at most Config.GlobalBatch examples. With n replicas, replica i gets the
// examples [i*per, (i+1)*per), per = ceil(GlobalBatch/n). A batch may hold fewer examples, and then the last replicas get
// fewer or none: they compute on padding of weight 0. The loss of a batch is the mean over its examples, by weight, whatever the
// replicas hold of it; a batch whose weights add up to 0 makes no step.
//
// # Steps
//
// A step happens or does not. New values become visible on all replicas after every replica has computed and reduced
// everything; if anything fails on any replica, or the context ends, every variable keeps its old value on every replica.
//
// # Equal bits
//
// Weights depend on the seed, the data, the number of replicas and the engine's build, and on nothing else: the same command
// twice gives the same [Trainer.WeightsHash]. Another number of replicas adds in another order and differs in the last digits.
//
// # Going on
//
// A [Snapshot] holds every replica's own bits and where Fit stands. A [Backup] writes snapshots while Fit runs, and a training that goes
// on from one ends with the weights and the history of a training that was never disturbed.
//
// # Several workers
//
// Over a multi-worker strategy every worker makes a trainer, with the same model and configuration, and calls the same
// methods with the same data, which yield global batches: each takes its replicas' shares. All begin with the chief's
// values, stop after the same step ([Trainer.Stop]), and come to the bits of one worker with as many replicas. Another
// model, other data (one bit of one example), or a variable that is set on some workers only is an error on all of
// them: of New, or of the step, which changes nothing.
//
// The package does not say how a model computes (package engine), nor how replicas meet (packages distribute and
// collective).
package train
