package inspect

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/doctor"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/collective/flight"
)

func TestRecordsPage(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	call := func(seq uint64, begin, end int, state flight.State, waits ...int) flight.Call {
		c := flight.Call{
			Seq: seq, Op: "all_reduce", Reduce: "SUM", DType: "float32", Count: 6, Shape: []int{6}, Name: "<gradient>",
			Algorithm: "direct", State: state, Start: at.Add(time.Duration(begin) * time.Second), WaitsFor: waits,
		}
		if end > 0 {
			c.End = at.Add(time.Duration(end) * time.Second)
		}
		return c
	}
	members := []flight.Member{
		{Worker: 0, Host: "a", PID: 11, First: 0, Replicas: 1},
		{Worker: 1, Host: "b", PID: 12, First: 1, Replicas: 1},
		{Worker: 2, Host: "b", PID: 13, First: 2, Replicas: 1},
	}
	var files []flight.File
	for worker := range 2 {
		rank := flight.Rank{Comm: "world", Rank: worker, Size: 3, Entered: 3, Calls: []flight.Call{
			call(0, 0, 1, flight.Done), call(1, 1, 2, flight.Done), call(2, 3+worker, 0, flight.Waiting, 2),
		}}
		files = append(files, flight.File{
			Header: flight.Header{Version: 1, Job: "job", Worker: worker, At: at.Add(9 * time.Second), Members: members},
			Ranks:  []flight.Rank{rank},
		})
	}
	d := diagnosis{Folder: "records", Report: flight.Find(files)}
	page := filepath.Join(t.TempDir(), "page.html")
	if err := writeRecordsPage(page, &d, files); err != nil {
		t.Fatal(err)
	}
	texts, data := clitest.ReadPage(t, page)
	for _, want := range []string{
		"Records of job \"job\", epoch 0|Records of 2 of 3 workers.", "rank 2|left no record", "+9s",
		"call 2, all_reduce SUM float32 [6] of \"<gradient>\", waiting, 6s", "2 (waited for)", "rank 2 has left no record",
	} {
		if !strings.Contains(texts, want) {
			t.Errorf("no %q in %s", want, texts)
		}
	}
	if !strings.Contains(data, `"blamed":[2]`) {
		t.Errorf("data %s", data)
	}
	part := recordsPartOf(0, &d.Parts[0], files)
	for rank := range 2 {
		last := part.Lanes[rank].Calls[2]
		if !last.At || last.State != "waiting" || last.W <= 0 || last.X+last.W > part.Width || part.Lanes[rank].Blamed {
			t.Errorf("rank %d: %+v", rank, last)
		}
	}
	if !part.Lanes[2].Blamed || len(part.Lanes[2].Calls) != 0 {
		t.Errorf("%+v", part.Lanes[2])
	}
	for i := range files { // times are optional
		for k := range files[i].Ranks[0].Calls {
			files[i].Ranks[0].Calls[k].Start, files[i].Ranks[0].Calls[k].End = time.Time{}, time.Time{}
		}
	}
	if part := recordsPartOf(0, &d.Parts[0], files); len(part.Lanes) != 0 || len(part.Rows) != 3 {
		t.Errorf("%+v", part)
	}
}

func TestHeatMap(t *testing.T) {
	r := &doctor.Report{Workers: []doctor.Worker{{Worker: 0}, {Worker: 1}, {Worker: 2}}, Pairs: []doctor.Pair{
		{A: 0, B: 1, Reach: "tcp", There: 4e9, Back: 1e9},
		{A: 0, B: 2, Reach: "tcp", There: 2e9, Back: 2e9},
		{A: 1, B: 2, Problem: "no answer within 10s"},
	}}
	m := heatMapOf(r, "Bandwidth", "", "--line-3", func(p *doctor.Pair, back bool) (float64, string) {
		if back {
			return p.Back, cli.FormatRate(p.Back)
		}
		return p.There, cli.FormatRate(p.There)
	})
	cell := func(from, to int) heatCell { return m.Rows[from].Cells[to] }
	if cell(0, 1).Text != "4GB/s, tcp" || cell(1, 0).Text != "1GB/s, tcp" || cell(0, 1).Strength <= cell(1, 0).Strength {
		t.Errorf("%+v, %+v", cell(0, 1), cell(1, 0))
	}
	if c := cell(2, 1); !c.Bad || c.Text != "no answer" || c.Strength != 0 || cell(1, 1).Text != "–" {
		t.Errorf("%+v", c)
	}
}
