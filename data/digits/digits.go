// Package digits holds a real data set small enough to travel inside the binary: the Optical Recognition of
// Handwritten Digits of the UCI Machine Learning Repository, 3,823 training and 1,797 test images of 8 by 8 pixels, by 43
// writers, none of whom is in both parts. See LICENSE in this folder for its authors and terms (CC BY 4.0).
//
// It takes about 140 KB, in binaries that import this package only.
package digits

import (
	"embed"

	"github.com/lockstep-ml/lockstep/data"
)

// The four files are IDX files under MNIST's names, written by internal/gen.
//
//go:embed *-ubyte.gz
var files embed.FS

// white is the largest value of a pixel, a count of dots in a 4 by 4 block.
const white = 16

// Load returns the data set: images float32 [8, 8, 1] from 0 to 1, in the original order.
func Load() (*data.Set, error) { return data.ImagesFS(files, "digits", white) }
