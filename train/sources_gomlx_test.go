package train

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"iter"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/tensors"
	gomlxtrain "github.com/gomlx/gomlx/ml/train"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// sourceRows is the number of examples of each source; batches of 7 leave a smaller last one.
const sourceRows = 24

// numbered returns the example of a fakeModel that has a number, and whose contents depend on it.
func numbered(i int) data.Batch {
	x := []float64{math.Sin(float64(i)), math.Cos(3 * float64(i))}
	return data.Batch{
		Inputs: []*tensor.Tensor{tensor.From(x)}, Labels: []*tensor.Tensor{tensor.Scalar(2*x[0] - x[1] + 1/float64(i+1))},
	}
}

// numberedBy maps the elements of a pipeline to the numbered examples.
func numberedBy(p data.Pipeline, number func(e data.Element) int) data.Pipeline {
	return p.Map(func(_ context.Context, e data.Element) (data.Element, error) { return numbered(number(e)), nil })
}

// sourcesOf returns a pipeline of the numbered examples, or of batches of them, from each kind of source.
func sourcesOf(t *testing.T) map[string]data.Pipeline {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, contents []byte) string {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, contents, 0o666); err != nil {
			t.Fatal(err)
		}
		return name
	}
	must := func(p data.Pipeline, err error) data.Pipeline {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	var lines, csv, records, archive bytes.Buffer
	npy := []byte("\x93NUMPY\x01\x00")
	header := fmt.Sprintf("{'descr': '<i4', 'fortran_order': False, 'shape': (%d, 2), }\n", sourceRows)
	npy = append(append(npy, byte(len(header)), 0), header...)
	idx := binary.BigEndian.AppendUint32([]byte{0, 0, 0x0c, 2}, sourceRows)
	idx = binary.BigEndian.AppendUint32(idx, 2)
	csv.WriteString("a,number\n")
	w := tar.NewWriter(&archive)
	all, list := data.Batch{Inputs: []*tensor.Tensor{nil}, Labels: []*tensor.Tensor{nil}}, make([]int32, sourceRows)
	x, y := make([]float64, 0, 2*sourceRows), make([]float64, 0, sourceRows)
	for i := range sourceRows {
		number := strconv.Itoa(i)
		fmt.Fprintln(&lines, number)
		fmt.Fprintf(&csv, "text,%s\n", number)
		records.Write(data.AppendTFRecord(nil, []byte(number)))
		h := tar.Header{Name: fmt.Sprintf("%03d.txt", i), Mode: 0o644, Size: int64(len(number)), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(number)); err != nil {
			t.Fatal(err)
		}
		npy = binary.LittleEndian.AppendUint32(npy, uint32(i))
		npy = binary.LittleEndian.AppendUint32(npy, 7)
		idx = binary.BigEndian.AppendUint32(idx, uint32(i))
		idx = binary.BigEndian.AppendUint32(idx, 7)
		img := image.NewGray(image.Rect(0, 0, 2, 2))
		img.SetGray(0, 0, color.Gray{uint8(i)})
		var b bytes.Buffer
		if err := png.Encode(&b, img); err != nil {
			t.Fatal(err)
		}
		write(fmt.Sprintf("images/class %d/%03d.png", i%2, i), b.Bytes())
		one := numbered(i)
		x, y = append(x, tensor.Data[float64](one.Inputs[0])...), append(y, tensor.Data[float64](one.Labels[0])...)
		list[i] = int32(i)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	all.Inputs[0], all.Labels[0] = tensor.Of(x, sourceRows, 2), tensor.Of(y, sourceRows)
	table, err := data.OpenCSV(t.Context(), write("table.csv", csv.Bytes()), data.CSV{}, data.IndexOptions{})
	if err != nil {
		t.Fatal(err)
	}
	images, err := data.ImageFolder(filepath.Join(dir, "images"), data.ImageOptions{Channels: 1})
	if err != nil {
		t.Fatal(err)
	}
	text := func(e data.Element) int {
		i, err := strconv.Atoi(strings.TrimSpace(e.(*tensor.Tensor).StringData()[0]))
		if err != nil {
			t.Error(err)
		}
		return i
	}
	first := func(e data.Element) int { return int(tensor.Data[int32](e.(*tensor.Tensor))[0]) }
	ofImage := func(e data.Element) int {
		return int(math.Round(float64(tensor.Data[float32](e.(data.Batch).Inputs[0])[0]) * 255))
	}
	ofRow := func(e data.Element) int {
		return text(tensor.Strings(e.(*tensor.Tensor).StringData()[1:2], []int{}...))
	}
	ofSequence := func(e data.Element) int { return int(tensor.Data[int32](e.(data.Batch).Inputs[0])[0]) / 2 }
	memory := fromTensors(all)
	numbers := fromTensors(tensor.Of(list))
	tokens := make([]int32, 2*sourceRows+1)
	for i := range tokens {
		tokens[i] = int32(i)
	}
	halves := []data.Pipeline{memory.Take(sourceRows / 3), memory.Skip(sourceRows / 3)}
	return map[string]data.Pipeline{
		"memory": memory.Shuffle(1).Batch(7),
		"function": data.FromFunc(sourceRows, func(_ context.Context, i int) (data.Element, error) {
			return numbered(i), nil
		}).Shuffle(1).Workers(2).Batch(7).Prefetch(2),
		"lines": numberedBy(must(data.OpenLines(t.Context(), []string{write("lines.txt", lines.Bytes())},
			data.IndexOptions{})), text).Shuffle(1).Batch(7),
		"lines, as a stream": numberedBy(data.Lines(filepath.Join(dir, "lines.txt")), text).ShuffleBuffer(1, 9).Batch(7),
		"CSV":                numberedBy(table.Rows, ofRow).Shuffle(1).Batch(7),
		"TFRecord": numberedBy(must(data.OpenTFRecords(t.Context(), []string{write("x.tfrecord", records.Bytes())},
			data.IndexOptions{})), text).Shuffle(1).Batch(7),
		"TFRecord, as a stream": numberedBy(data.TFRecords(filepath.Join(dir, "x.tfrecord")), text).Batch(7),
		"tar": numberedBy(must(data.OpenTar(t.Context(), []string{write("x.tar", archive.Bytes())}, data.IndexOptions{})),
			func(e data.Element) int { return text(e.(map[string]*tensor.Tensor)["txt"]) }).Shuffle(1).Batch(7),
		"npy": numberedBy(must(data.OpenNPY(t.Context(), write("x.npy", npy), data.IndexOptions{})), first).
			Shuffle(1).Batch(7),
		"IDX": numberedBy(must(data.OpenIDX(t.Context(), write("x.idx", idx), data.IndexOptions{})), first).
			Shuffle(1).Batch(7),
		"image folder": numberedBy(images.Images, ofImage).Shuffle(1).Batch(7),
		"sequences":    numberedBy(must(data.Sequences(tensor.Of(tokens), 2)), ofSequence).Shuffle(1).Batch(7),
		"Concat":       data.Concat(halves...).Shuffle(1).Batch(7),
		"Mix":          data.Mix(sourceRows, 5, []float64{1, 3}, halves[0].Shuffle(2), halves[1]).Batch(7),
		"Zip": data.Zip([]data.Pipeline{fromTensors(all.Inputs[0])}, []data.Pipeline{fromTensors(all.Labels[0])}).
			Shuffle(1).Batch(7),
		"Cache": numberedBy(numbers, func(e data.Element) int {
			return int(tensor.Data[int32](e.(*tensor.Tensor))[0])
		}).Cache(1 << 20).Shuffle(1).Batch(7),
		"Take, Skip and Repeat": memory.Skip(2).Take(11).Shuffle(1).Repeat(2).Batch(7),
		"iter.Seq2": data.FromSeq(-1, func(context.Context) iter.Seq2[data.Element, error] {
			return func(yield func(data.Element, error) bool) {
				for i := range sourceRows {
					if !yield(numbered(i), nil) {
						return
					}
				}
			}
		}).Batch(7),
		"GoMLX's Dataset": gomlx.Dataset(batchesOfGoMLX{}),
	}
}

// batchesOfGoMLX is a dataset of GoMLX with batches of the numbered examples.
type batchesOfGoMLX struct{}

func (batchesOfGoMLX) Name() string { return "numbered" }

func (batchesOfGoMLX) Iter() iter.Seq2[gomlxtrain.Batch, error] {
	return func(yield func(gomlxtrain.Batch, error) bool) {
		for lo := 0; lo < sourceRows; lo += 7 {
			var x [][]float64
			var y []float64
			for i := lo; i < min(lo+7, sourceRows); i++ {
				one := numbered(i)
				x, y = append(x, tensor.Data[float64](one.Inputs[0])), append(y, tensor.Data[float64](one.Labels[0])[0])
			}
			b := gomlxtrain.Batch{
				Inputs: []*tensors.Tensor{tensors.FromValue(x)}, Labels: []*tensors.Tensor{tensors.FromValue(y)},
			}
			if !yield(b, nil) {
				return
			}
		}
	}
}

// sharesOf returns the hash of the epoch's batches, of which each of so many workers reads its rows.
func sharesOf(t *testing.T, p data.Pipeline, workers int) string {
	t.Helper()
	ctx := data.WithEpoch(t.Context(), 1)
	r, err := data.Open(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	rows, ok := r.(data.RowReader)
	if !ok { // every worker reads everything
		h, err := data.Hash(ctx, p)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	h, err := data.Hash(ctx, data.FromSeq(-1, func(ctx context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for b := range rows.Len() {
				n := rows.Rows(b)
				per := (n + workers - 1) / workers
				joined := data.Batch{Inputs: []*tensor.Tensor{tensor.New(tensor.Float64, n, 2)}, Labels: []*tensor.Tensor{
					tensor.New(tensor.Float64, n),
				}}
				for lo := 0; lo < n; lo += per {
					var mine []int
					for row := lo; row < min(lo+per, n); row++ {
						mine = append(mine, row)
					}
					e, ids, err := rows.ReadRows(ctx, b, mine)
					if err != nil {
						yield(nil, err)
						return
					}
					part := e.(data.Batch)
					copy(tensor.Data[float64](joined.Inputs[0])[2*lo:], tensor.Data[float64](part.Inputs[0]))
					copy(tensor.Data[float64](joined.Labels[0])[lo:], tensor.Data[float64](part.Labels[0]))
					for i, id := range ids {
						if id != rows.RowID(b, mine[i]) {
							t.Errorf("batch %d, row %d has the identity %d, want %d", b, mine[i], id, rows.RowID(b, mine[i]))
						}
					}
				}
				if !yield(joined, nil) {
					return
				}
			}
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestSourcesOverWorkers checks for every kind of source that 1, 2 and 4 workers read the same order, train to the same
// bits, and resume inside an epoch.
func TestSourcesOverWorkers(t *testing.T) {
	t.Parallel()
	layouts := [][]int{{4}, {2, 2}, {1, 1, 1, 1}}
	for name, p := range sourcesOf(t) {
		t.Run(name, func(t *testing.T) {
			stream, err := data.Hash(data.WithEpoch(t.Context(), 1), p)
			if err != nil {
				t.Fatal(err)
			}
			for _, workers := range []int{1, 2, 4} {
				if h := sharesOf(t, p, workers); h != stream {
					t.Errorf("%d workers read an epoch with the hash %s, want %s", workers, h, stream)
				}
			}
			cfg := FitConfig{Epochs: 2}
			var want []fakeValues
			var history *History
			dir := t.TempDir()
			for i, layout := range layouts {
				if testing.Short() && i == 1 { // the others are in one resumed training
					continue
				}
				if i == 0 || !testing.Short() {
					h, state, _ := fitWithBackup(t, layout, p, cfg, BackupConfig{})
					if i == 0 {
						want, history = state, h
					}
					if !reflect.DeepEqual(state, want) || textOf(h) != textOf(history) {
						t.Errorf("%v: got\n%s\n%v, want\n%s\n%v", layout, textOf(h), state, textOf(history), want)
					}
				}
				if testing.Short() && i == 0 {
					continue
				}
				// A training that ends inside the second epoch is continued by another number of workers.
				at, some := filepath.Join(dir, strconv.Itoa(i)), cfg
				some.Steps = history.Steps/2 + 1 + i%2
				fitWithBackup(t, layout, p, some, BackupConfig{Dir: at})
				other := layouts[(i+2)%len(layouts)]
				if h, state, _ := fitWithBackup(t, other, p, cfg, BackupConfig{Resume: at}); !reflect.DeepEqual(state, want) ||
					textOf(h) != textOf(history) {
					t.Errorf("%v resumed by %v after %d steps: got\n%s\n%v, want\n%s\n%v", layout, other, some.Steps, textOf(h),
						state, textOf(history), want)
				}
			}
		})
	}
}
