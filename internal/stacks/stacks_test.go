package stacks_test

import (
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/lockstep-ml/lockstep/internal/stacks"
)

func TestParse(t *testing.T) {
	tests := []struct {
		name string
		text string
		want []stacks.Goroutine
	}{
		{
			name: "main goroutine with arguments of all kinds",
			text: "goroutine 1 [running]:\n" +
				"main.f(0x1, {0xc000012345, 0x5, 0x5}, {{0x1, ...}, _, 0xc0?}, ...)\n" +
				"\t/home/u/my app/f.go:12 +0x1d\n" +
				"main.main()\n" +
				"\t/home/u/my app/main.go:7\n",
			want: []stacks.Goroutine{{ID: 1, State: "running", Frames: []stacks.Frame{
				{Func: "main.f", File: "/home/u/my app/f.go", Line: 12},
				{Func: "main.main", File: "/home/u/my app/main.go", Line: 7},
			}}},
		},
		{
			name: "two goroutines, wait time, creator",
			text: "goroutine 18 [chan receive, 5 minutes, locked to thread]:\n" +
				"example.com/x/y.(*T).Method(0xc0)\n\t/y.go:3 +0x2\n" +
				"created by example.com/x/y.New in goroutine 1\n\t/y.go:9 +0x44\n" +
				"\n" +
				"goroutine 19 [sync.Mutex.Lock]:\nsync.(*Mutex).Lock(...)\n\tC:/go/src/sync/mutex.go:46\n",
			want: []stacks.Goroutine{
				{
					ID: 18, State: "chan receive", Minutes: 5, Creator: 1,
					Frames:    []stacks.Frame{{Func: "example.com/x/y.(*T).Method", File: "/y.go", Line: 3}},
					CreatedBy: stacks.Frame{Func: "example.com/x/y.New", File: "/y.go", Line: 9},
				},
				{
					ID: 19, State: "sync.Mutex.Lock",
					Frames: []stacks.Frame{{Func: "sync.(*Mutex).Lock", File: "C:/go/src/sync/mutex.go", Line: 46}},
				},
			},
		},
		{
			name: "synctest bubble, no cases",
			text: "goroutine 7 [select (no cases) (durable), 12 minutes, synctest bubble 3]:\n",
			want: []stacks.Goroutine{{ID: 7, State: "select (no cases)", Minutes: 12}},
		},
		{
			name: "header of a crash, labels that look like its end",
			text: "goroutine 7 gp=0xc00010 m=3 mp=0xc000 [running labels:{\"a]:, b\": \"c\"}]:\nmain.f()\n\t/f.go:1 +0x1 " +
				"fp=0xc0 sp=0xc0 pc=0x47\n",
			want: []stacks.Goroutine{{
				ID: 7, State: "running",
				Frames: []stacks.Frame{{Func: "main.f", File: "/f.go", Line: 1}},
			}},
		},
		{
			name: "generics, closures, method values, go statement of a bound call",
			text: "goroutine 7 [select]:\n" +
				"example.com/p.Map[...].func1({0x1, 0x2})\n\t/p.go:1 +0x1\n" +
				"example.com/p.(*Set[...]).Add-fm(0x1)\n\t/p.go:2 +0x1\n" +
				"example.com/p.init.0.gowrap1()\n\t/p.go:3 +0x1\n" +
				"created by example.com/p.Go[...] in goroutine 12345678901\n\t/p.go:4 +0x1\n",
			want: []stacks.Goroutine{{
				ID: 7, State: "select", Creator: 12345678901,
				Frames: []stacks.Frame{
					{Func: "example.com/p.Map[...].func1", File: "/p.go", Line: 1},
					{Func: "example.com/p.(*Set[...]).Add-fm", File: "/p.go", Line: 2},
					{Func: "example.com/p.init.0.gowrap1", File: "/p.go", Line: 3},
				},
				CreatedBy: stacks.Frame{Func: "example.com/p.Go[...]", File: "/p.go", Line: 4},
			}},
		},
		{
			name: "omitted frames, known number",
			text: "goroutine 7 [running]:\nmain.f(...)\n\t/f.go:1\n...23 frames elided...\nmain.main()\n\t/f.go:2 +0x1\n",
			want: []stacks.Goroutine{{ID: 7, State: "running", Frames: []stacks.Frame{
				{Func: "main.f", File: "/f.go", Line: 1}, {Func: "main.main", File: "/f.go", Line: 2},
			}}},
		},
		{
			name: "omitted frames, unknown number",
			text: "goroutine 7 [running]:\nmain.f(...)\n\t/f.go:1\n...additional frames elided...\ncreated by " +
				"main.main\n\t/f.go:2 +0x1\n",
			want: []stacks.Goroutine{{
				ID: 7, State: "running", Frames: []stacks.Frame{{Func: "main.f", File: "/f.go", Line: 1}},
				CreatedBy: stacks.Frame{Func: "main.main", File: "/f.go", Line: 2},
			}},
		},
		{
			name: "ancestors are not frames",
			text: "goroutine 7 [running]:\nmain.f()\n\t/f.go:1 +0x1\n" +
				"[originating from goroutine 3]:\nmain.g()\n\t/f.go:2 +0x1\n",
			want: []stacks.Goroutine{{
				ID: 7, State: "running",
				Frames: []stacks.Frame{{Func: "main.f", File: "/f.go", Line: 1}},
			}},
		},
		{
			name: "message of a panic before, exit status after",
			text: "panic: goroutine trouble\n\ngoroutine 7 [running]:\npanic({0x1, 0x2})\n\t/go/src/runtime/panic.go:783 " +
				"+0x132\n\nexit status 2\n",
			want: []stacks.Goroutine{{
				ID: 7, State: "running",
				Frames: []stacks.Frame{{Func: "panic", File: "/go/src/runtime/panic.go", Line: 783}},
			}},
		},
		{
			name: "stack unavailable, carriage returns",
			text: "goroutine 7 [running]:\r\n\tgoroutine running on other thread; stack unavailable\r\n",
			want: []stacks.Goroutine{{ID: 7, State: "running"}},
		},
		{
			name: "cut off in the middle of a line",
			text: "goroutine 7 [running]:\nmain.f()\n\t/f.go:1 +0x1\nmain.g(0x",
			want: []stacks.Goroutine{{
				ID: 7, State: "running",
				Frames: []stacks.Frame{{Func: "main.f", File: "/f.go", Line: 1}},
			}},
		},
		{name: "not a goroutine", text: "goroutine x [running]:\nmain.f()\n\t/f.go:1 +0x1\n"},
		{name: "header cut off", text: "goroutine 7 [runn\nmain.f()\n"},
		{name: "empty"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := stacks.Parse(test.text)
			if !slices.EqualFunc(got, test.want, equal) {
				t.Errorf("Parse:\n got %+v\nwant %+v\nof\n%s", got, test.want, test.text)
			}
		})
	}
}

func equal(a, b stacks.Goroutine) bool {
	return a.ID == b.ID && a.State == b.State && a.Minutes == b.Minutes && a.CreatedBy == b.CreatedBy &&
		a.Creator == b.Creator && slices.Equal(a.Frames, b.Frames)
}

func TestFrame(t *testing.T) {
	tests := []struct{ fn, name string }{
		{"main.main", "main.main"},
		{"example.com/a/b.(*T).M.func1", "b.(*T).M.func1"},
		{"example.com/a/b.Map[...].func1", "b.Map[...].func1"},
		{"example.com/a/b.Map[go.shape.struct { F example.com/c.T }]", "b.Map[go.shape.struct { F example.com/c.T }]"},
		{"panic", "panic"},
		{"", ""},
	}
	for _, test := range tests {
		f := stacks.Frame{Func: test.fn}
		if f.Name() != test.name {
			t.Errorf("%q: Name %q, want %q", test.fn, f.Name(), test.name)
		}
	}
	f := stacks.Frame{Func: "example.com/a/b.F", File: "/x/b.go", Line: 3}
	if got, want := f.String(), "/x/b.go:3 (b.F)"; got != want {
		t.Errorf("String: got %q, want %q", got, want)
	}
}

// held is a method that blocks, which snapshots must show.
type held[T any] struct{ release chan T }

func (h *held[T]) wait() { <-h.release }

func TestSnapshot(t *testing.T) {
	h := &held[int]{make(chan int)}
	var wg sync.WaitGroup
	id := make(chan uint64)
	wg.Go(func() {
		id <- stacks.ID()
		h.wait()
	})
	theirs := <-id
	defer wg.Wait()
	defer close(h.release)
	// The other goroutine may not wait yet: repeat until it does.
	for {
		all := stacks.Snapshot()
		if all[0].ID != stacks.ID() || all[0].State != "running" || all[0].ID != stacks.Self().ID {
			t.Fatalf("the first goroutine is %d [%s], want the caller's, %d", all[0].ID, all[0].State, stacks.ID())
		}
		i := slices.IndexFunc(all, func(g stacks.Goroutine) bool { return g.ID == theirs })
		if i < 0 {
			t.Fatalf("goroutine %d is missing", theirs)
		}
		g := all[i]
		if g.State != "chan receive" {
			continue
		}
		if got, want := g.Frames[0].Name(), "stacks_test.(*held[...]).wait"; got != want {
			t.Errorf("innermost frame is %q, want %q", got, want)
		}
		if g.Creator != all[0].ID || !strings.HasSuffix(g.CreatedBy.Func, "(*WaitGroup).Go") {
			t.Errorf("created by %v in goroutine %d, want WaitGroup.Go in %d", g.CreatedBy, g.Creator, all[0].ID)
		}
		return
	}
}

func TestSnapshotInBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stop := make(chan struct{})
		go func() { <-stop }()
		synctest.Wait()
		all := stacks.Snapshot()
		blocked := 0
		for _, g := range all {
			if g.State == "chan receive" && g.Creator == all[0].ID {
				blocked++
			}
		}
		if blocked != 1 {
			t.Errorf("%d goroutines are blocked in a receive, want 1: %+v", blocked, all)
		}
		close(stop)
	})
}

func TestDeepStack(t *testing.T) {
	var dive func(n int) stacks.Goroutine
	dive = func(n int) stacks.Goroutine {
		if n > 0 {
			g := dive(n - 1)
			return g
		}
		return stacks.Self()
	}
	g := dive(300)
	if len(g.Frames) < 50 || !strings.HasPrefix(g.Frames[len(g.Frames)-1].Func, "testing.") {
		t.Errorf("a stack of 300 calls has %d frames, the last of %q", len(g.Frames), g.Frames[len(g.Frames)-1].Func)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(string(debug.Stack()))
	f.Add("goroutine 7 [select (durable), 5 minutes, locked to thread, synctest bubble " +
		"1]:\nmain.f(...)\n\t/f.go:1\n...23 frames elided...\ncreated by main.g in goroutine 9\n\t/f.go:1 " +
		"+0x1\n\ngoroutine 8 [running]:\n")
	f.Add("goroutine 1 [a labels:{\"k\": \"v\"}]:\n(\n()\n\t:\n\t:1\n... frames elided...\n...99999999999999999999 " +
		"frames elided...\ncreated by \n")
	f.Add("goroutine 99999999999999999999 []:\ngoroutine 1 [:\ngoroutine 1 []:\ngoroutine 1]:[\n")
	f.Fuzz(func(t *testing.T, text string) {
		all := stacks.Parse(text)
		if got, most := len(all), strings.Count(text, "goroutine "); got > most {
			t.Fatalf("%d goroutines of at most %d headers", got, most)
		}
		frames := 0
		for _, g := range all {
			if g.Minutes < 0 {
				t.Fatalf("blocked for %d minutes", g.Minutes)
			}
			for _, frame := range append(slices.Clone(g.Frames), g.CreatedBy) {
				frames++
				if frame.Line < 0 || frame.Line > 0 && frame.File == "" {
					t.Fatalf("place %q:%d", frame.File, frame.Line)
				}
				if !strings.Contains(text, frame.Func) || !strings.Contains(text, frame.File) {
					t.Fatalf("frame %+v is not in the text", frame)
				}
				if !strings.HasSuffix(frame.Func, frame.Name()) {
					t.Fatalf("function %q has name %q", frame.Func, frame.Name())
				}
				_ = frame.String()
			}
		}
		if lines := strings.Count(text, "\n") + 1; frames > lines+len(all) {
			t.Fatalf("%d frames of %d lines", frames, lines)
		}
		// Truncating the text, as a full buffer does, never changes the goroutines before the last one.
		if len(all) > 1 {
			cut := stacks.Parse(text[:len(text)-1])
			if !slices.EqualFunc(all[:len(all)-2], cut[:max(0, min(len(cut), len(all)-2))], equal) {
				t.Fatal("cutting off the last byte changed an earlier goroutine")
			}
		}
	})
}

func BenchmarkID(b *testing.B) {
	for b.Loop() {
		stacks.ID()
	}
}
