package predict

import (
	"image"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/training"
)

// TestPredictImages trains on black and white images, and classifies images that lie in no folder of a class.
func TestPredictImages(t *testing.T) {
	dir := t.TempDir()
	for class, level := range map[string]uint8{"black": 10, "white": 240} {
		for i := range 8 {
			writeGrey(t, filepath.Join(dir, "train", class, string(rune('a'+i))+".png"), 8, level+uint8(i))
		}
	}
	writeGrey(t, filepath.Join(dir, "new", "1.png"), 20, 12)
	writeGrey(t, filepath.Join(dir, "new", "sub", "2.PNG"), 8, 250)
	writeGrey(t, filepath.Join(dir, "new", ".hidden.png"), 8, 250)
	out := filepath.Join(dir, "out")
	cmd := clitest.Commands()
	cmd.SetArgs([]string{
		"train", "--data", "images", "--data-dir", filepath.Join(dir, "train"), "--model", "mlp", "--epochs", "20",
		"--global-batch", "4", "--replicas", "1", "--progress", "none", "--out", out,
	})
	cmd.SetOut(&strings.Builder{})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ command, dir, want string }{
		{"predict", "new", "1.png\tblack\t"},
		{"predict", "new", filepath.Join("sub", "2.PNG") + "\twhite\t"},
		{"eval", "train", "accuracy  100.00 %"},
	} {
		var text strings.Builder
		cmd := clitest.Commands()
		cmd.SetArgs([]string{c.command, "--from", out, "--data-dir", filepath.Join(dir, c.dir)})
		cmd.SetOut(&text)
		if err := cmd.Execute(); err != nil || !strings.Contains(text.String(), c.want) ||
			strings.Contains(text.String(), "hidden") {
			t.Errorf("%s of %s: %v, printed %s want %s", c.command, c.dir, err, text.String(), c.want)
		}
	}
	if _, err := imagesBelow(out); err == nil || !strings.Contains(err.Error(), "no images") {
		t.Errorf("a folder without images: %v", err)
	}
	for _, err := range imageInputs([]string{filepath.Join(out, training.ConfigFile)}, []int{8, 8, 3}) {
		if err == nil || !strings.Contains(err.Error(), training.ConfigFile) {
			t.Errorf("a file in another format: %v", err)
		}
	}
}

// TestImagesDifferInSize checks that the error of the first image of another size names the flag that resizes them.
func TestImagesDifferInSize(t *testing.T) {
	dir := t.TempDir()
	for i, class := range []string{"black", "white"} {
		for j := range 4 {
			writeGrey(t, filepath.Join(dir, class, string(rune('a'+j))+".png"), 8+i, 100)
		}
	}
	cmd := clitest.Commands()
	cmd.SetArgs([]string{
		"train", "--data", "images", "--data-dir", dir, "--model", "mlp", "--hidden", "4", "--epochs", "1",
		"--global-batch", "4", "--replicas", "1", "--progress", "none",
	})
	cmd.SetOut(&strings.Builder{})
	err := cmd.Execute()
	if err == nil || !strings.Contains(err.Error(), "the images differ in size") ||
		!strings.HasSuffix(err.Error(), "to resize the images, give --image-size") {
		t.Errorf("got %v", err)
	}
}

// writeGrey writes an image of one level.
func writeGrey(t *testing.T, name string, side int, level uint8) {
	t.Helper()
	img := image.NewGray(image.Rect(0, 0, side, side))
	for i := range img.Pix {
		img.Pix[i] = level
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := png.Encode(f, img); err != nil {
		t.Fatal(err)
	}
}

// TestLikeliest checks class and probability.
func TestLikeliest(t *testing.T) {
	logits := []float32{0, 1, 1}
	if class, p := likeliest(logits); class != 1 || p < 0.4223 || p > 0.4224 {
		t.Errorf("got %d, %v: want 1, e/(1+2e)", class, p)
	}
}
