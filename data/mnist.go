package data

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// MNIST reads MNIST, or a data set with the same layout (Fashion-MNIST, KMNIST, QMNIST's ten digits), from
// four files in the folder dir. Their names are {train,t10k}-{images-idx3,labels-idx1}-ubyte, also with a dot
// before idx, each optionally gzipped with the suffix .gz. If a file is missing, the error lists the names
// that were tried, and matches fs.ErrNotExist.
func MNIST(dir string) (*Set, error) { return mnistFrom(os.DirFS(dir), "mnist", dir, 255) }

// ImagesFS is [MNIST] for any file system, such as an embedded one. name is the name of the set, and white
// the value of a pixel that maps to 1.
func ImagesFS(files fs.FS, name string, white float32) (*Set, error) {
	return mnistFrom(files, name, "", white)
}

const mnistClasses = 10

func mnistFrom(files fs.FS, name, dir string, white float32) (*Set, error) {
	set := &Set{Name: name, Classes: mnistClasses}
	for _, part := range []struct {
		prefix string
		into   *Pipeline
	}{{"train", &set.Train}, {"t10k", &set.Test}} {
		images, file, err := loadMNIST(files, dir, part.prefix, "images", 3)
		if err != nil {
			return nil, err
		}
		labels, labelsFile, err := loadMNIST(files, dir, part.prefix, "labels", 1)
		if err != nil {
			return nil, err
		}
		if n, m := images.Shape()[0], labels.Shape()[0]; n != m {
			return nil, fmt.Errorf("data: %s has %d images, but %s %d labels", file, n, labelsFile, m)
		}
		shape := append(slices.Clone(images.Shape()[1:]), 1)
		if set.Shape != nil && !slices.Equal(shape, set.Shape) {
			return nil, fmt.Errorf("data: %s: images of %v, where the training set's are %v", file, shape[:2], set.Shape[:2])
		}
		set.Shape = shape
		if *part.into, err = FromImages(images, labels, white); err != nil {
			return nil, fmt.Errorf("data: %s: %w", file, err)
		}
	}
	return set, nil
}

// loadMNIST reads one of the four files, and checks its kind and rank.
func loadMNIST(files fs.FS, dir, prefix, kind string, rank int) (*tensor.Tensor, string, error) {
	var names []string
	for _, sep := range []string{"-", "."} {
		name := fmt.Sprintf("%s-%s%sidx%d-ubyte", prefix, kind, sep, rank)
		names = append(names, name, name+".gz")
	}
	for _, name := range names {
		f, err := files.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		full := path.Join(dir, name)
		if err != nil {
			if e := (*fs.PathError)(nil); errors.As(err, &e) {
				err = e.Err // its path lacks the folder
			}
			return nil, "", fmt.Errorf("data: open %s: %w", full, err)
		}
		defer f.Close()
		s, err := newSource(f, full, "IDX")
		if err != nil {
			return nil, "", err
		}
		t, err := readIDX(s)
		if err != nil {
			return nil, "", err
		}
		return t, full, checkMNIST(s, t, kind, rank)
	}
	if dir == "" {
		dir = "."
	}
	return nil, "", fmt.Errorf("data: no %s %s in %s: looked for %s: %w", prefix, kind, dir, strings.Join(names, ", "),
		fs.ErrNotExist)
}

func checkMNIST(s *source, t *tensor.Tensor, kind string, rank int) error {
	if t.DType() != tensor.Uint8 || t.Rank() != rank {
		return s.wrong(0, fmt.Errorf("%s expected, uint8 of %d dimensions; the file holds %v%s", kind, rank, t.DType(),
			tensor.FormatShape(t.Shape())))
	}
	if kind != "labels" {
		return nil
	}
	for i, label := range tensor.Data[uint8](t) {
		if label >= mnistClasses {
			return s.wrong(int64(8+i), fmt.Errorf("label %d of example %d: want 0 to %d", label, i, mnistClasses-1))
		}
	}
	return nil
}
