package train

import "time"

// History is what [Trainer.Fit] did.
type History struct {
	Epochs  []Epoch `json:"epochs"`  // also the one that was not finished
	Steps   int     `json:"steps"`   // batches, skipped ones included
	Skipped int     `json:"skipped"` // batches whose weights added up to 0
	Stopped bool    `json:"stopped"` // a callback ended training
	Speed   Speed   `json:"speed"`
}

// Epoch is one epoch of a History.
type Epoch struct {
	Result

	Epoch      int           `json:"epoch"` // from 0
	Steps      int           `json:"steps"`
	Duration   time.Duration `json:"nanoseconds"`          // without validation
	Validation *Result       `json:"validation,omitempty"` // nil: none was made
}
