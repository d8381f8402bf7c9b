package checkpoint

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// LoadWeights reads weights that this or another program has written. path is one of:
//
//   - a safetensors file
//   - a sharded one, by its index: model.safetensors.index.json
//   - a TensorFlow or Keras checkpoint, by its prefix or its .index file
//   - a GoMLX checkpoint, by its .json file
//   - a folder with one of these: a model of Hugging Face, a snapshot of this package, or the checkpoints of
//     TensorFlow or GoMLX, of which the newest counts
//
// The tensors are sorted by name. Metadata is that of safetensors files, and otherwise empty. Formats that
// contain code (pickle) or need a library (HDF5) are refused with an error that says how to convert them. The
// caller owns the tensors.
func LoadWeights(path string) ([]Tensor, map[string]string, error) {
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		file, err := weightsIn(path)
		if err != nil {
			return nil, nil, err
		}
		return LoadWeights(file)
	case errors.Is(err, fs.ErrNotExist) && exists(path+bundleIndex):
		return withoutMetadata(loadBundle(path))
	case err != nil:
		return nil, nil, wrap(err)
	}
	switch name := filepath.Base(path); {
	case strings.HasSuffix(name, shardIndex):
		return loadShards(path)
	case strings.HasSuffix(name, bundleIndex):
		return withoutMetadata(loadBundle(strings.TrimSuffix(path, bundleIndex)))
	case strings.HasPrefix(name, gomlxPrefix) && strings.HasSuffix(name, gomlxVariables):
		return withoutMetadata(loadGoMLX(strings.TrimSuffix(path, gomlxVariables)))
	}
	if how, refused := conversions[filepath.Ext(path)]; refused {
		return nil, nil, fmt.Errorf("checkpoint: %s: this format is not supported: convert it in Python: %s", path, how)
	}
	return Load(path)
}

// conversions are Python expressions that convert files by their extension.
var conversions = map[string]string{
	".h5":    fromKeras,
	".hdf5":  fromKeras,
	".keras": fromKeras,
	".bin":   fromTorch,
	".pt":    fromTorch,
	".pth":   fromTorch,
	".ckpt":  fromTorch,
	".pkl":   fromTorch,
}

const (
	fromKeras = `safetensors.numpy.save_file({w.path: w.numpy() for w in model.weights}, "weights.safetensors")`
	fromTorch = `safetensors.torch.save_file(model.state_dict(), "weights.safetensors") (save_model, if tensors share memory)`
)

func withoutMetadata(tensors []Tensor, err error) ([]Tensor, map[string]string, error) {
	return tensors, map[string]string{}, err
}

// weightsIn returns the file of weights in a folder.
func weightsIn(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", wrap(err)
	}
	var indexes, files, bundles, gomlx []string
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasPrefix(name, "."):
		case strings.HasSuffix(name, shardIndex):
			indexes = append(indexes, name)
		case strings.HasSuffix(name, ".safetensors"):
			files = append(files, name)
		case strings.HasSuffix(name, bundleIndex):
			bundles = append(bundles, name)
		case strings.HasPrefix(name, gomlxPrefix) && strings.HasSuffix(name, gomlxVariables):
			gomlx = append(gomlx, name)
		}
	}
	newest := gomlx[max(0, len(gomlx)-1):] // GoMLX's names are in the order of time
	if state, err := os.ReadFile(filepath.Join(dir, "checkpoint")); err == nil && len(bundles) > 0 {
		if _, rest, ok := strings.Cut(string(state), `model_checkpoint_path: "`); ok {
			name, _, _ := strings.Cut(rest, `"`)
			bundles = []string{filepath.Base(name) + bundleIndex}
		}
	}
	for _, list := range [][]string{indexes, files, bundles, newest} {
		switch {
		case len(list) == 1:
			return filepath.Join(dir, list[0]), nil
		case len(list) > 1:
			return "", fmt.Errorf("checkpoint: %s has several files of weights (%s): name one of them", dir,
				strings.Join(list, ", "))
		}
	}
	return "", fmt.Errorf("checkpoint: %s has no weights: want a .safetensors file, its index, or a checkpoint of "+
		"TensorFlow or GoMLX", dir)
}

// shardIndex ends the name of the index of several safetensors files, which together hold a model.
const shardIndex = ".safetensors.index.json"

// loadShards reads the files of an index. Every tensor must be in the file that the index names.
func loadShards(path string) ([]Tensor, map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, wrap(err)
	}
	var index struct {
		Files map[string]string `json:"weight_map"` // by tensor
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, nil, fmt.Errorf("checkpoint: %s: %w", path, err)
	}
	if len(index.Files) == 0 {
		return nil, nil, fmt.Errorf("checkpoint: %s: no weight_map: want the index of a sharded model", path)
	}
	var tensors []Tensor
	metadata := map[string]string{}
	for _, file := range slices.Compact(slices.Sorted(maps.Values(index.Files))) {
		if filepath.Base(file) != file {
			return nil, nil, fmt.Errorf("checkpoint: %s names the file %q: want a file in the same folder", path, file)
		}
		list, m, err := Load(filepath.Join(filepath.Dir(path), file))
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", path, err)
		}
		for _, t := range list {
			if index.Files[t.Name] != file {
				return nil, nil, fmt.Errorf("checkpoint: %s has the tensor %q, which %s places in %q", file, t.Name,
					path, index.Files[t.Name])
			}
			delete(index.Files, t.Name)
		}
		tensors = append(tensors, list...)
		maps.Copy(metadata, m)
	}
	if len(index.Files) > 0 {
		missing := slices.Sorted(maps.Keys(index.Files))
		return nil, nil, fmt.Errorf("checkpoint: %s: the files lack %d of its tensors: %s", path, len(missing),
			FormatNames(missing))
	}
	slices.SortFunc(tensors, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	return tensors, metadata, nil
}

// FormatNames joins names for an error: the first ten, and the number of the others.
func FormatNames(names []string) string {
	const most = 10
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
