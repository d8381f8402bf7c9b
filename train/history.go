package train

import "time"

// History is what [Trainer.Fit] did.
type History struct {
	Epochs  []Epoch // also the one that was not finished
	Steps   int     // batches, skipped ones included
	Skipped int     // batches whose weights added up to 0, or that Config.NotFinite has left out
	Stopped bool    // a callback or Trainer.Stop ended training
	Speed   Speed
}

// Epoch is one epoch of a History.
type Epoch struct {
	Result

	Epoch      int // from 0
	Steps      int
	Duration   time.Duration // without validation
	Validation *Result       // nil: none was made
}
