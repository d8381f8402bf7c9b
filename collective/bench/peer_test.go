package bench_test

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/bench"
)

func TestReadPeer(t *testing.T) {
	file := func(name string) string {
		text, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	const us = time.Microsecond
	for _, c := range []struct {
		name, text, format string
		first, last        bench.PeerResult
		n                  int
	}{
		{
			"osu", file("osu.txt"), "OSU",
			bench.PeerResult{Bytes: 4, Median: 1230},
			bench.PeerResult{Bytes: 16 << 20, Median: 9120700},
			5,
		},
		{
			"osu_allgather, per rank", "\n# OSU MPI Allgather Latency Test v7.4\n# Size  Avg Latency(us)\n1 1.5\n8 2\n", "OSU",
			bench.PeerResult{Bytes: 1, Median: 1500, PerRank: true},
			bench.PeerResult{Bytes: 8, Median: 2 * us, PerRank: true},
			2,
		},
		{
			"osu_reduce_scatter, the whole", "# OSU MPI Reduce_scatter Latency Test v7.4\n4 1.5\n8 2\n", "OSU",
			bench.PeerResult{Bytes: 4, Median: 1500},
			bench.PeerResult{Bytes: 8, Median: 2 * us},
			2,
		},
		{
			"nccl-tests", file("nccl-tests.txt"), "nccl-tests",
			bench.PeerResult{Bytes: 8, Median: 12310},
			bench.PeerResult{Bytes: 16 << 20, Median: 662300, BusBW: 25.33},
			4,
		},
		{
			"json", `{"op":"all_reduce","bytes":4,"median_ns":1500,"busbw":0.1}` + "\n" + `{"bytes":8,"median_ns":2000}`,
			"lockstep",
			bench.PeerResult{Bytes: 4, Median: 1500, BusBW: 0.1},
			bench.PeerResult{Bytes: 8, Median: 2 * us},
			2,
		},
		{
			"table of an older version", "#  size  count  time  best  algbw  busbw\n# bytes elements us us GB/s GB/s\n" +
				" 4 1 1.5 1.2 0.1 0.2\n 8 2 2.0 1.9 0.2 0.3\n", "lockstep",
			bench.PeerResult{Bytes: 4, Median: 1500, BusBW: 0.2},
			bench.PeerResult{Bytes: 8, Median: 2 * us, BusBW: 0.3},
			2,
		},
		{
			"plain", "lockstep-tcp ranks=2 bytes=4 us=1.5\nlockstep-tcp ranks=2 bytes=1024 us=20\n", "lockstep",
			bench.PeerResult{Bytes: 4, Median: 1500},
			bench.PeerResult{Bytes: 1024, Median: 20 * us},
			2,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, format, err := bench.ReadPeer(strings.NewReader(c.text))
			if err != nil {
				t.Fatal(err)
			}
			if format != c.format || len(got) != c.n || got[0] != c.first || got[len(got)-1] != c.last {
				t.Errorf("%s: %+v; want %s: %d results from %+v to %+v", format, got, c.format, c.n, c.first, c.last)
			}
		})
	}
}

func TestReadPeerOfOurTable(t *testing.T) {
	o := bench.Options{Ranks: 2, Sizes: []int{4, 4096}, Calls: 5, Format: "table", Overlap: true, Limit: true}
	var out bytes.Buffer
	want, err := bench.Run(t.Context(), &out, o)
	if err != nil {
		t.Fatal(err)
	}
	got, format, err := bench.ReadPeer(&out)
	if err != nil || format != "lockstep" || len(got) != 2 {
		t.Fatalf("%v, %s, %v", got, format, err)
	}
	for i := range got {
		if got[i].Bytes != want[i].Bytes || (got[i].Median-want[i].Median).Abs() > 100*time.Nanosecond {
			t.Errorf("%+v, want %+v", got[i], want[i])
		}
	}
}

func TestReadPeerErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                     "no measurements",
		"4 1.5":                "no measurements",
		"# OSU MPI Test\n4 -1": `line 2: time "-1": want microseconds`,
		"# OSU MPI Test\nlockstep-mem ranks=2 bytes=4 us=1": "line 2: output of lockstep after that of OSU",
		"# time algbw busbw\n8 2 float sum":                 "line 2: 4 columns",
		`{"bytes":4}`:                                       "line 1: want an object of lockstep bench",
		"lockstep-mem us=1":                                 `line 1: size ""`,
		"# size count time best algbw busbw\n4 1 1 1 1":     "line 2: 5 columns: want 6",

		"# size time best algbw busbw\n4 1 1 1 1\n# size time best algbw busbw": "line 3: a second table: want one",
		"# size type redop time best algbw busbw\n4 int8 sum 1 1 1 1\n8 int8 max 1 1 1 1": "line 3: a measurement " +
			"of int8 max after those of int8 sum",
		`{"op":"reduce","bytes":4,"median_ns":1}` + "\n" + `{"op":"gather","bytes":4,"median_ns":1}`: "line 2: " +
			"a measurement of gather after those of reduce",
		"lockstep-mem ranks=2 bytes=4 us=1 op=reduce dtype=int8 reduce=sum\n" +
			"lockstep-mem ranks=2 bytes=4 us=1 op=reduce dtype=int8 reduce=max": "line 2: a measurement of reduce int8 " +
			"max after those of reduce int8 sum",
	} {
		if _, _, err := bench.ReadPeer(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzReadPeer(f *testing.F) {
	for _, name := range []string{"osu.txt", "nccl-tests.txt"} {
		text, err := os.ReadFile("testdata/" + name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Add(`{"bytes":4,"median_ns":1500,"busbw":0.1}`)
	f.Add("# size count time best algbw busbw\n4 1 1.5 1.2 0.1 0.1")
	f.Add("# size type redop time best algbw busbw\n4 int8 sum 1 1 1 1\n8 int8 max 1 1 1 1")
	f.Add("lockstep-mem ranks=2 bytes=4 us=1.5 op=reduce dtype=int8 reduce=sum")
	f.Fuzz(func(t *testing.T, text string) {
		got, _, err := bench.ReadPeer(strings.NewReader(text))
		bad := func(r bench.PeerResult) bool { return r.Bytes < 0 || r.Median < 0 || !(r.BusBW >= 0) }
		if err == nil && (len(got) == 0 || slices.ContainsFunc(got, bad)) {
			t.Errorf("%v without an error", got)
		}
	})
}
