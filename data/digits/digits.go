// Package digits embeds a real data set that is small enough for a binary: the Optical Recognition of
// Handwritten Digits of the UCI Machine Learning Repository. It has 3,823 training and 1,797 test images of 8
// by 8 pixels, by 43 writers, each of them in only one part. See LICENSE in this folder for its authors and
// terms (CC BY 4.0).
//
// It adds about 140 KB to binaries that import this package.
package digits

import (
	"embed"

	"github.com/lockstep-ml/lockstep/data"
)

// The four files are IDX files with MNIST's names, written by internal/gen.
//
//go:embed *-ubyte.gz
var files embed.FS

// white is the largest value of a pixel, a count of dots in a 4 by 4 block.
const white = 16

// Load returns the data set: images float32 [8, 8, 1] from 0 to 1, in the original order.
func Load() (*data.Set, error) { return data.ImagesFS(files, "digits", white) }
