package doctor

import (
	"bytes"
	"flag"
	"os"
	"testing"
	"time"
)

var golden = flag.Bool("golden", false, "write the golden texts of a report")

// sick is a report of four workers on two hosts: a CPU of worker 1 computes wrongly, the link from worker 2 to worker 1
// is slow, worker 3 does not answer worker 0, and its clock is wrong.
func sick() *Report {
	r := &Report{Bytes: 1 << 20}
	for i, host := range []string{"a", "a", "b", "b"} {
		r.Workers = append(r.Workers, Worker{
			Worker: i, Host: host, PID: 10 + i,
			Facts: []Fact{{Name: "version", Value: []string{"v1", "v1", "v1", "v2"}[i], Alike: true}},
		})
	}
	r.Workers[1].Facts = append(r.Workers[1].Facts,
		Fact{Name: "known answers", Value: "wrong on CPU 3", Wrong: "CPU 3 is wrong"})
	for b := range 4 {
		for a := range b {
			p := Pair{
				A: a, B: b, Reach: "tcp+tls", RoundTrip: 40 * time.Microsecond, There: 1.2e9, Back: 1.1e9,
				Ahead: time.Duration(b-a) * time.Microsecond,
			}
			switch {
			case a == 0 && b == 1:
				p.Reach, p.RoundTrip, p.There, p.Back = "shm", 1500*time.Nanosecond, 9e9, 8.5e9
			case a == 1 && b == 2:
				p.Back = 9e7
				p.RoundTrip = 2 * time.Millisecond
			case a == 0 && b == 3:
				p = Pair{A: a, B: b, Problem: "collective: deadline exceeded"}
			case a == 0:
				p.Ahead = -3 * time.Hour
			}
			r.Pairs = append(r.Pairs, p)
		}
	}
	r.advise(nil)
	return r
}

// TestPrint: the text for people, and the JSON for programs.
func TestPrint(t *testing.T) {
	for name, print := range map[string]func(*Report, *bytes.Buffer) error{
		"table": func(r *Report, b *bytes.Buffer) error { return r.Print(b) },
		"plain": func(r *Report, b *bytes.Buffer) error { return r.PrintPlain(b) },
	} {
		var got bytes.Buffer
		if err := print(sick(), &got); err != nil {
			t.Fatal(err)
		}
		path := "testdata/sick." + name
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
	}
}

// TestMerge: a result that a worker reports for a pair of others is refused.
func TestMerge(t *testing.T) {
	for _, text := range []string{
		`[{"Low":0,"High":1}]`, `[{"Low":2,"High":1}]`, `[{"Low":-1,"High":2}]`,
		`[{"Low":2,"High":3}]`, `no JSON`,
	} {
		if _, err := merge(3, [][]byte{nil, nil, []byte(text)}); err == nil {
			t.Errorf("%s of worker 2 was taken", text)
		}
	}
}
