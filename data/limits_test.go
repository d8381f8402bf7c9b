package data_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// TestUnpackedSizes reads small compressed files that would fill the memory, by every reader of files.
func TestUnpackedSizes(t *testing.T) {
	skipRace(t)
	const zeros = 100 << 20
	bomb := writeFile(t, "bomb.gz", zippedZeros(t, idx(0x08, []uint32{zeros}), zeros))
	lines := writeFile(t, "lines.gz", zippedZeros(t, nil, zeros))
	for name, load := range map[string]func() error{
		"IDX": func() error { _, err := data.LoadIDX(bomb); return err },
		"lines": func() error {
			_, err := firstError(t.Context(), data.Lines(lines))
			return err
		},
		"CSV": func() error { _, err := data.LoadCSV(lines, data.CSV{}); return err },
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			if n := allocated(func() { err = load() }); n > 512<<20 {
				t.Errorf("%d bytes were allocated", n)
			}
			if name == "IDX" && (err == nil || !strings.Contains(err.Error(), "compressed bytes decompress to more than 67") ||
				!strings.Contains(err.Error(), "gunzip")) {
				t.Errorf("got %v, want a limit of what it grows to, and gunzip", err)
			}
			if err == nil {
				t.Error("no error")
			}
		})
	}
}

// skipRace skips a test that decompresses hundreds of MiB in one goroutine, where nothing can race.
func skipRace(t *testing.T) {
	t.Helper()
	if race.Enabled {
		t.Skip("-race: it decompresses hundreds of MiB in one goroutine")
	}
}

// TestUnpackedSizesOfData reads compressed files as large as data sets are, which grow as those do.
func TestUnpackedSizesOfData(t *testing.T) {
	skipRace(t)
	random := rand.New(rand.NewPCG(1, 2))
	for _, size := range [][2]int{{0, 40 << 20}, {3 << 20, 77 << 20}} { // random bytes, and zeros
		head := idx(0x08, []uint32{uint32(size[0] + size[1])})
		for range size[0] / 8 {
			head = binary.LittleEndian.AppendUint64(head, random.Uint64())
		}
		name := writeFile(t, "x.gz", zippedZeros(t, head, size[1]))
		if x, err := data.LoadIDX(name); err != nil || x.Len() != size[0]+size[1] {
			t.Errorf("%d random bytes and %d zeros: got %v", size[0], size[1], err)
		}
	}
}

// TestLargerThanMemory reads a sparse file that claims, and has, more than the machine has memory.
func TestLargerThanMemory(t *testing.T) {
	const side = 1 << 16
	head := idx(0x08, []uint32{side, side, 1 << 10}) // 4 TiB
	name := filepath.Join(t.TempDir(), "sparse")
	if err := os.WriteFile(name, head, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name, int64(len(head))+side*side<<10); err != nil {
		t.Skip("the file system has no such files:", err)
	}
	var err error
	if n := allocated(func() { _, err = data.LoadIDX(name) }); n > 16<<20 {
		t.Errorf("%d bytes were allocated", n)
	}
	checkFormatError(t, err, int64(len(head)), "4398046511104 bytes", "of memory are available")
}

// TestManyColumns reads tables with increasing numbers of columns: the work is proportional to their number, not to its
// square.
func TestManyColumns(t *testing.T) {
	const columns = 200_000
	var head, row strings.Builder
	names := make([]string, columns)
	for i := range columns {
		names[i] = fmt.Sprintf("feature%d", i)
		if i > 0 {
			head.WriteByte(',')
			row.WriteByte(',')
		}
		head.WriteString(names[i])
		row.WriteByte('1')
	}
	f, err := data.ReadCSV(strings.NewReader(head.String()+"\n"+row.String()+"\n"), data.CSV{})
	if err != nil {
		t.Fatal(err)
	}
	if x, err := f.Floats(); err != nil || x.Len() != columns {
		t.Errorf("all columns: %v", err)
	}
	if rest := f.Without(names[1:]...); len(rest) != 1 || rest[0] != names[0] {
		t.Errorf("without all columns but one: %d are left", len(rest))
	}
	if _, err := f.Floats("missing"); err == nil || len(err.Error()) > 2000 ||
		!strings.Contains(err.Error(), "199950 more") {
		t.Errorf("a missing column: %.3000v", err)
	}
	twice := strings.Replace(head.String(), names[columns-1], names[0], 1)
	if _, err := data.ReadCSV(strings.NewReader(twice), data.CSV{}); err == nil ||
		!strings.Contains(err.Error(), `columns 1 and 200000 are both named "feature0"`) {
		t.Errorf("a column twice: %.300v", err)
	}
}
