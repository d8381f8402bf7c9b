package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestConvert writes the embedded files back as UCI's text and converts that, and compares the result.
func TestConvert(t *testing.T) {
	for _, prefix := range []string{"train", "t10k"} {
		t.Run(prefix, func(t *testing.T) {
			images, labels := load(t, "../..", prefix)
			px := tensor.Data[uint8](images)
			var text strings.Builder
			for i, label := range tensor.Data[uint8](labels) {
				for _, x := range px[64*i : 64*(i+1)] {
					fmt.Fprintf(&text, "%d,", x)
				}
				fmt.Fprintln(&text, label)
			}
			dir := t.TempDir()
			from := filepath.Join(dir, "optdigits")
			if err := os.WriteFile(from, []byte(text.String()), 0o666); err != nil {
				t.Fatal(err)
			}
			if err := convert(from, dir, prefix); err != nil {
				t.Fatal(err)
			}
			gotImages, gotLabels := load(t, dir, prefix)
			if !gotImages.Equal(images) || !gotLabels.Equal(labels) {
				t.Errorf("got %v, %v", gotImages, gotLabels)
			}
		})
	}
}

func load(t *testing.T, dir, prefix string) (images, labels *tensor.Tensor) {
	t.Helper()
	images, err := data.LoadIDX(filepath.Join(dir, prefix+"-images-idx3-ubyte.gz"))
	if err != nil {
		t.Fatal(err)
	}
	labels, err = data.LoadIDX(filepath.Join(dir, prefix+"-labels-idx1-ubyte.gz"))
	if err != nil {
		t.Fatal(err)
	}
	return images, labels
}
