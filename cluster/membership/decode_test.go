package membership

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// FuzzDecode: whatever a store or a node's file holds, decoding it ends without a panic, and what it returns can be
// used.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"node":1,"count":2,"epoch":3,"workers":[{"worker":4,"silent_ms":5,"step":6,"count":7,"final":true}]}`))
	f.Add([]byte(`{"term":1,"count":2,"node":0,"doubts":[{"node":-1,"workers":[1,9],"lost":true}],"left":[[0,70000]]}`))
	f.Add([]byte(`{"by":0,"echo":[1,2],"view":{"term":1,"count":1,"left":[[-1,3]],"first":{"worker":1}}}`))
	f.Add(bytes.Repeat([]byte{0xff}, 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		now := time.Now()
		timing := Timing{Every: time.Second, Min: time.Second, Timeout: time.Minute}
		if r, err := DecodeReport(b); err == nil {
			j := newJudge(timing, map[int][]int{0: {0}, 1: {1, 2}}, now)
			j.record(now, true, r)
			v, next := j.view(now.Add(time.Minute))
			if len(v.Doubts) == 0 || next.Before(now) {
				t.Errorf("%+v, next %v", v, next)
			}
		}
		for _, answer := range []bool{false, true} {
			file := NewMemoryFile(2)
			text := b
			if !answer {
				text = append(append([]byte(`{"echo":[1],"view":`), b...), '}')
			}
			if len(text) <= answerBytes {
				_ = file.write(2, 1, text)
			}
			m := NewMember(MemberConfig{Nodes: [][]int{{0, 1}, {2}}, File: file, Timing: timing})
			m.poll(now, 0, 0)
			if n := len(m.States()); n != 3 {
				t.Errorf("%d states", n)
			}
		}
		if len(b) > 0 { // a slot that another process has half written
			file := NewMemoryFile(1)
			_ = file.write(0, 1, []byte(`{"count":1}`))
			_, _ = file.file.WriteAt(b[:min(len(b), slotBytes)], 0)
			if _, text, fresh := file.read(0, 0); fresh && len(text) > slotBytes*2 && len(text) > len(b) {
				t.Errorf("%d bytes", len(text))
			}
		}
	})
}

// TestDeclaredLost: a worker that reads that the others have declared it lost ends, whatever its own clock says.
func TestDeclaredLost(t *testing.T) {
	file := NewMemoryFile(2)
	text := `{"view":{"term":1,"count":1,"doubts":[{"node":-1,"workers":[0],"lost":true,"silent_ms":31000}]}}`
	if err := file.write(2, 1, []byte(text)); err != nil {
		t.Fatal(err)
	}
	m := NewMember(MemberConfig{
		Nodes: [][]int{{0, 1}}, File: file, Timing: Timing{Every: time.Second, Min: time.Second, Timeout: time.Minute},
	})
	m.poll(time.Now(), 0, 0)
	if v, err := m.Lost(t.Context()); !errors.Is(err, ErrDeclaredLost) || !errors.Is(err, rendezvous.ErrLost) {
		t.Errorf("%v, %v, want ErrDeclaredLost", v, err)
	}
}
