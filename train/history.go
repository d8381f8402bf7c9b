package train

import "time"

// History is the result of [Trainer.Fit].
type History struct {
	Epochs  []Epoch // including an incomplete last one
	Steps   int     // batches processed, including skipped ones
	Skipped int     // batches whose weights added up to 0, or that Config.NotFinite or an overflow of float16 skipped
	Stopped bool    // a callback or Trainer.Stop ended training
	Speed   Speed   // throughput
	// Validations are those between steps: see FitConfig.ValidateEvery.
	Validations []Validation
}

// Validation is a validation of a History after a step.
type Validation struct {
	Result

	Epoch    int    // from 0
	Step     int    // of all epochs, from 1
	Training Result // over the epoch's examples so far
}

// Epoch is one epoch of a History.
type Epoch struct {
	Result

	Epoch      int           // from 0
	Steps      int           // batches processed, including skipped ones
	Duration   time.Duration // of its steps, without validation
	Validation *Result       // after the epoch; nil: not evaluated
}
