package checkpoint

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
)

// A GoMLX checkpoint is a JSON file that lists hyperparameters and variables, and a file with the elements of
// the variables, in the same order and without gaps, compressed or not.
const (
	gomlxPrefix    = "checkpoint-"
	gomlxVariables = ".json"
	gomlxData      = ".bin"
	gomlxVariable  = "var:"                       // before a variable's path
	gomlxGzip      = "gomlx_checkpointss\x04gzip" // begins a compressed file
)

// gomlxTypes maps dtypes to their names in GoMLX.
var gomlxTypes = map[tensor.DType]string{
	tensor.Bool: "Bool", tensor.Int8: "Int8", tensor.Int16: "Int16", tensor.Int32: "Int32", tensor.Int64: "Int64",
	tensor.Uint8: "Uint8", tensor.Uint16: "Uint16", tensor.Uint32: "Uint32", tensor.Uint64: "Uint64",
	tensor.Float16: "Float16", tensor.BFloat16: "BFloat16", tensor.Float32: "Float32", tensor.Float64: "Float64",
}

// gomlxFile is the JSON file. Its fields, and those of its elements, have GoMLX's names.
type gomlxFile struct {
	Params    []json.RawMessage
	Variables []gomlxEntry
	BinFormat string
}

type gomlxEntry struct {
	ParameterName string
	Dimensions    []int
	DType         string
	Pos, Length   uint64
}

// loadGoMLX reads the GoMLX checkpoint with the given path without extension.
func loadGoMLX(base string) ([]Tensor, error) {
	text, err := os.ReadFile(base + gomlxVariables)
	if err != nil {
		return nil, wrap(err)
	}
	var file gomlxFile
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", base+gomlxVariables, err)
	}
	f, err := os.Open(base + gomlxData)
	if err != nil {
		return nil, wrap(err)
	}
	defer f.Close()
	tensors, err := readGoMLX(file, f)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", base+gomlxData, err)
	}
	return tensors, nil
}

// readGoMLX reads the variables that file lists.
func readGoMLX(file gomlxFile, f io.Reader) ([]Tensor, error) {
	if bigEndian() {
		return nil, errBigEndian
	}
	in := bufio.NewReaderSize(f, 1<<18)
	var r io.Reader = in
	if lead, _ := in.Peek(len(gomlxGzip)); string(lead) == gomlxGzip {
		_, _ = in.Discard(len(lead))
		unzipped, err := gzip.NewReader(in)
		if err != nil {
			return nil, err
		}
		r = unzipped
	}
	var tensors []Tensor
	seen := map[string]bool{}
	at := uint64(0)
	for _, v := range file.Variables {
		name, ok := strings.CutPrefix(v.ParameterName, gomlxVariable)
		if !ok || name == "" || seen[name] {
			return nil, fmt.Errorf("the variable %q: want different names that begin with %q", v.ParameterName, gomlxVariable)
		}
		seen[name] = true
		dtype := tensor.Invalid
		for d, n := range gomlxTypes {
			if strings.EqualFold(n, v.DType) {
				dtype = d
			}
		}
		if dtype == tensor.Invalid {
			return nil, fmt.Errorf("variable %s has the dtype %q, which is not supported", name, v.DType)
		}
		size, err := sizeOf(v.Dimensions, dtype)
		if err != nil || size != v.Length || v.Pos != at {
			return nil, cmp.Or(err, fmt.Errorf("variable %s takes %d bytes from byte %d, want %d from byte %d for %s%v", name,
				v.Length, v.Pos, size, at, v.DType, v.Dimensions))
		}
		at += size
		// As many bytes as there are: a damaged length must not allocate more than the file has.
		var data bytes.Buffer
		if n, err := io.CopyN(&data, r, int64(size)); err != nil {
			return nil, fmt.Errorf("variable %s: %d bytes of %d: %w", name, n, size, cmp.Or(unlessEOF(err), io.ErrUnexpectedEOF))
		}
		t := tensor.New(dtype, v.Dimensions...)
		copy(t.Memory().HostBytes(), data.Bytes())
		if dtype == tensor.Bool && slices.ContainsFunc(data.Bytes(), func(b byte) bool { return b > 1 }) {
			return nil, fmt.Errorf("variable %s: a boolean is neither 0 nor 1", name)
		}
		tensors = append(tensors, Tensor{name, t})
	}
	if n, err := io.Copy(io.Discard, r); err != nil || n > 0 { // it also verifies gzip's checksum
		return nil, cmp.Or(err, fmt.Errorf("%d bytes follow the last variable", n))
	}
	slices.SortFunc(tensors, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	return tensors, nil
}

func unlessEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// SaveGoMLX writes tensors into the folder dir as a checkpoint that GoMLX's package ml/model/checkpoint loads.
// Names must be those of GoMLX's variables, such as "/dense/weights", as the trainer's are. Each file is
// written atomically, the one by which GoMLX finds the checkpoint last. A later checkpoint in the folder
// replaces it, and so does the trainer of GoMLX that saves there next. step is the number of training steps.
// It returns the path of the JSON file.
func SaveGoMLX(dir string, tensors []Tensor, step int64) (string, error) {
	if bigEndian() {
		return "", errBigEndian
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", wrap(err)
	}
	old, err := filepath.Glob(filepath.Join(dir, gomlxPrefix+"n*"+gomlxVariables))
	if err != nil {
		return "", wrap(err)
	}
	count := 0
	for _, name := range old {
		var n int
		if _, err := fmt.Sscanf(filepath.Base(name), gomlxPrefix+"n%d-", &n); err == nil {
			count = max(count, n+1)
		}
	}
	base := filepath.Join(dir, fmt.Sprintf("%sn%07d-%s-step-%08d", gomlxPrefix, count,
		time.Now().Format("20060102-150405"), step))
	file := gomlxFile{Params: []json.RawMessage{}, BinFormat: "uncompressed"}
	sorted := slices.Clone(tensors)
	slices.SortFunc(sorted, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	at := uint64(0)
	for i, t := range sorted {
		dtype, ok := gomlxTypes[t.Value.DType()]
		if !ok || t.Value.Memory().Kind == tensor.Device || i > 0 && sorted[i-1].Name == t.Name || t.Name == "" {
			return "", fmt.Errorf("checkpoint: tensor %q (%v) cannot be written: want numbers in host memory, and different "+
				"names", t.Name, t.Value.DType())
		}
		e := gomlxEntry{gomlxVariable + t.Name, dimensions(t.Value), dtype, at, uint64(t.Value.Memory().Bytes)}
		at += e.Length
		file.Variables = append(file.Variables, e)
	}
	err = WriteFile(base+gomlxData, func(w io.Writer) error {
		for _, t := range sorted {
			if _, err := w.Write(t.Value.Memory().HostBytes()); err != nil {
				return fmt.Errorf("checkpoint: tensor %q: %w", t.Name, err)
			}
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	text, err := json.MarshalIndent(file, "", "\t")
	if err != nil {
		return "", wrap(err)
	}
	return base + gomlxVariables, WriteFile(base+gomlxVariables, func(w io.Writer) error {
		_, err := w.Write(text)
		return wrap(err)
	})
}
