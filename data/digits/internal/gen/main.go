// Command gen turns UCI's optdigits.tra and optdigits.tes into the files that package digits embeds:
//
//	go run ./data/digits/internal/gen FOLDER data/digits
//
// FOLDER contains the two files, with or without a first line of names. The output depends only on their
// contents.
package main

import (
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: gen FOLDER OUT\nFOLDER holds optdigits.tra and optdigits.tes")
		os.Exit(2)
	}
	for file, prefix := range map[string]string{"optdigits.tra": "train", "optdigits.tes": "t10k"} {
		if err := convert(filepath.Join(os.Args[1], file), os.Args[2], prefix); err != nil {
			fmt.Fprintln(os.Stderr, "gen:", err)
			os.Exit(1)
		}
	}
}

// convert writes the images and the labels of one file.
func convert(from, dir, prefix string) error {
	images, labels, err := data.LoadOptdigits(from)
	if err != nil {
		return err
	}
	if err := write(filepath.Join(dir, prefix+"-images-idx3-ubyte.gz"), images); err != nil {
		return err
	}
	return write(filepath.Join(dir, prefix+"-labels-idx1-ubyte.gz"), labels)
}

func write(name string, t *tensor.Tensor) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}
	if err := data.WriteIDX(z, t); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	return f.Close()
}
