package failure

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestFiles(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "records")
	if got, err := Read(folder, 0); len(got) != 0 || err != nil {
		t.Errorf("a folder that is not there: %v, %v", got, err)
	}
	when := time.Date(2026, 3, 1, 3, 0, 0, 0, time.UTC)
	one := Record{
		Job: "j", Epoch: 2, Worker: 10, Ranks: []int{20, 21}, Host: "h", PID: 7, Time: when, Kind: "panic",
		Message: "no\nway", Step: 3, Phase: "compute", Stack: "main.go:1", ExitCode: 2,
	}
	two := Record{Job: "j", Epoch: 2, Worker: 9, Time: when, Kind: "lost", Blames: []int{10}, ExitCode: -1}
	old := Record{Epoch: 1, Worker: 9, Time: when, Kind: "error"}
	for _, r := range []Record{one, two, old, two} {
		if err := Write(folder, &r); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Read(folder, 2)
	if want := []Record{two, one}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if left, _ := filepath.Glob(filepath.Join(folder, ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}

	for name, text := range map[string]string{
		"failure-2-1.json": `{"worker":`,                     // truncated
		"failure-2-3.json": `{"worker":4,"kind":"x"}`,        // of another worker
		"failure-2-5.json": strings.Repeat(" ", recordMax+2), // too long
		"failure-2-6.json": `{"epoch":2,"worker":6}`,         // without a kind
		"notes.txt":        "mine",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err = Read(folder, 2)
	if len(got) != 2 || err == nil {
		t.Fatalf("got %+v, %v; want two records and an error", got, err)
	}
	for _, name := range []string{"failure-2-1.json", "failure-2-3.json", "failure-2-5.json", "failure-2-6.json"} {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%v: does not name %s", err, name)
		}
	}
	if err := Write(filepath.Join(folder, "notes.txt"), &one); err == nil {
		t.Error("a folder that is a file was written to")
	}
}

func TestLongStack(t *testing.T) {
	long := strings.Repeat("é\x00", 1<<20)
	text, err := Encode(&Record{Kind: "panic", Stack: long, Message: long})
	if err != nil {
		t.Fatal(err)
	}
	r, err := Decode(text)
	if err != nil || !strings.HasSuffix(r.Stack, "cut off") || !strings.HasPrefix(long, r.Stack[:100]) {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

func FuzzDecode(f *testing.F) {
	text, _ := Encode(&Record{Worker: 1, Kind: "panic", Blames: []int{2}})
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := Decode(text)
		if err != nil {
			return
		}
		again, err := Encode(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Decode(again); err != nil {
			t.Errorf("%q: again %v", text, err)
		}
	})
}
