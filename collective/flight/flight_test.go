package flight_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
)

var golden = flag.Bool("golden", false, "write the golden texts of Find")

// start is when the jobs of the tests began, by the clock of worker 0. The clocks of the other workers are wrong by
// hours.
var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// job returns a job of one rank per worker, each of which has made the calls w and b alternately until call n.
func job(workers, n int) []flight.File {
	var members []flight.Member
	for i := range workers {
		members = append(members, flight.Member{
			Worker: i, Host: fmt.Sprintf("host%d", i/2), PID: 100 + i, First: i,
			Replicas: 1,
		})
	}
	files := make([]flight.File, workers)
	for i := range files {
		began := start.Add(time.Duration(i) * 5 * time.Hour)
		f := flight.File{Header: flight.Header{
			Version: 1, Job: "golden", Worker: i, Members: members,
			At: began.Add(time.Duration(n+100) * time.Second),
		}}
		r := flight.Rank{Comm: "world", Rank: i, Size: workers, Entered: uint64(n)}
		for seq := range n {
			c := all([]string{"w", "b"}[seq%2], 3-seq%2, flight.Done)
			c.Seq = uint64(seq)
			c.Start = began.Add(time.Duration(seq) * time.Second)
			c.End = c.Start.Add(time.Millisecond)
			r.Calls = append(r.Calls, c)
		}
		f.Ranks = append(f.Ranks, r)
		files[i] = f
	}
	return files
}

func all(name string, n int, s flight.State) flight.Call {
	return flight.Call{
		Op: "all_reduce", Reduce: "SUM", DType: "float32", Count: n, Name: name, Algorithm: "direct",
		State: s,
	}
}

// then adds a call to a rank's record. waits is how many seconds the rank was in the call when it failed, or when the
// record was written.
func then(f *flight.File, c flight.Call, waits float64, waitsFor ...int) {
	r := &f.Ranks[0]
	if !c.Pair {
		c.Seq = r.Entered
		r.Entered++
	}
	c.WaitsFor = waitsFor
	switch c.Start = f.At.Add(-time.Duration(waits * float64(time.Second))); c.State {
	case flight.Failed:
		c.Start, c.End = c.Start.Add(-time.Minute), c.Start.Add(time.Duration(waits*float64(time.Second))-time.Minute)
	case flight.Done:
		c.End = f.At
	}
	r.Calls = append(r.Calls, c)
}

func failed(c flight.Call, why string) flight.Call {
	c.State, c.Err = flight.Failed, why
	return c
}

func pair(op string, peer int, seq uint64) flight.Call {
	return flight.Call{Op: op, DType: "float32", Count: 3, Pair: true, Peer: peer, Seq: seq, State: flight.Waiting}
}

var stories = []struct {
	name  string
	kind  flight.Kind
	files func() []flight.File
}{
	{"killed", flight.Absent, func() []flight.File {
		files := job(3, 10)
		for _, i := range []int{0, 2} {
			then(&files[i], failed(all("w", 3, ""), "collective: peer lost: rank 1 is down: its process is gone"), 0.25, 1)
		}
		return []flight.File{files[0], files[2]}
	}},
	{"stuck", flight.Absent, func() []flight.File {
		files := job(4, 10)
		for _, i := range []int{0, 1, 3} {
			then(&files[i], all("w", 3, flight.Waiting), 30, 2)
		}
		return files
	}},
	{"order", flight.Differ, func() []flight.File {
		files := job(3, 10)
		for i := range files {
			name, n := "w", 3
			if i == 1 {
				name, n = "b", 2
			}
			then(&files[i], failed(all(name, n, ""), "collective: mismatch"), 0.001)
		}
		return files
	}},
	{"shape", flight.Differ, func() []flight.File {
		files := job(3, 10)
		for i := range files {
			c := all("w", 6, "")
			c.Shape = []int{2, 3}
			if i == 2 {
				c.Shape = []int{3, 2}
			}
			then(&files[i], failed(c, "collective: mismatch"), 0.001)
		}
		return files
	}},
	{"slow", flight.Slow, func() []flight.File {
		files := job(3, 0)
		for i := range files {
			for seq := range 20 {
				c := all("w", 3, flight.Done)
				c.Seq = uint64(seq)
				c.Start = files[i].At.Add(time.Duration(seq) * time.Second)
				c.End = c.Start.Add(600 * time.Millisecond)
				if i == 1 {
					c.End = c.Start.Add(time.Millisecond)
				}
				files[i].Ranks[0].Calls = append(files[i].Ranks[0].Calls, c)
			}
			files[i].Ranks[0].Entered = 20
			files[i].At = files[i].At.Add(30 * time.Second)
		}
		return files
	}},
	{"instead", flight.Crossed, func() []flight.File {
		files := job(2, 10)
		then(&files[0], all("w", 3, flight.Waiting), 5, 1)
		then(&files[1], pair("recv", 0, 4), 6, 0)
		return files
	}},
	{"crossed", flight.Crossed, func() []flight.File {
		files := job(2, 10)
		then(&files[0], pair("recv", 1, 4), 5, 1)
		then(&files[1], pair("recv", 0, 4), 6, 0)
		return files
	}},
	{"message", flight.Together, func() []flight.File {
		files := job(2, 10)
		then(&files[0], pair("send", 1, 4), 5, 1)
		then(&files[1], pair("recv", 0, 4), 6, 0)
		return files
	}},
	{"work", flight.Together, func() []flight.File {
		files := job(2, 10)
		then(&files[0], all("w", 3, flight.Waiting), 0.01, 1)
		return files
	}},
	{"truncated", flight.Inside, func() []flight.File {
		files := job(2, 10)
		then(&files[0], all("w", 3, flight.Waiting), 20, 1)
		then(&files[1], all("w", 3, flight.Waiting), 20, 0)
		return files
	}},
	{"together", flight.Together, func() []flight.File { return job(2, 10) }},
}

// TestFind checks the reports of typical failures.
func TestFind(t *testing.T) {
	for _, s := range stories {
		t.Run(s.name, func(t *testing.T) {
			r := flight.Find(s.files())
			if got := r.Parts[0].Kind; got != s.kind {
				t.Errorf("kind %s, want %s", got, s.kind)
			}
			var got bytes.Buffer
			if err := r.Print(&got); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join("testdata", s.name+".golden")
			if *golden {
				if err := os.WriteFile(path, got.Bytes(), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got.String(), want)
			}
		})
	}
}

// TestFiles checks that written records can be read, and that files that are not records are named and do not hide the
// others.
func TestFiles(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "records")
	files := stories[1].files()
	for i := range files {
		if err := flight.Write(folder, &files[i]); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		"flight-0-7.jsonl": "no JSON", "flight-0-8.jsonl": "", "flight-0-9.jsonl": `{"flight":{"version":1,"worker":1}}`,
		"flight-0-5.jsonl": `{"flight":{"version":2,"worker":5}}`,
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := flight.Read(folder)
	if !reflect.DeepEqual(got, files) {
		t.Errorf("got %+v\nwant %+v", got, files)
	}
	for _, want := range []string{
		"flight-0-7.jsonl: line 1: invalid record", "flight-0-8.jsonl: it is empty",
		"it holds the records of flight-0-1.jsonl", "version 2 of the format: want 1",
	} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%v\ndoes not contain %q", err, want)
		}
	}
}

// FuzzDecode checks that everything that is accepted can be merged, printed and written again.
func FuzzDecode(f *testing.F) {
	for _, s := range stories {
		for _, file := range s.files()[:1] {
			for i := range file.Ranks { // short ones are changed, and read, a hundred times as often
				r := &file.Ranks[i]
				r.Calls = r.Calls[max(0, len(r.Calls)-4):]
			}
			var b bytes.Buffer
			if err := flight.Encode(&b, &file); err != nil {
				f.Fatal(err)
			}
			f.Add(b.Bytes())
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := flight.Decode(bytes.NewReader(text))
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := flight.Find([]flight.File{*got, stories[0].files()[0]}).Print(&b); err != nil {
			t.Fatal(err)
		}
		if i := bytes.IndexFunc(b.Bytes(), func(r rune) bool { return r < ' ' && r != '\n' }); i >= 0 {
			t.Errorf("control character %#x in %q", b.Bytes()[i], b.String())
		}
		b.Reset()
		if err := flight.Encode(&b, got); err != nil {
			t.Fatal(err)
		}
		if _, err := flight.Decode(&b); err != nil {
			t.Errorf("not read again: %v", err)
		}
	})
}
