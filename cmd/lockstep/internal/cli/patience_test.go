package cli

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestReassure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		stop := Reassure(&out, func() string { return "waiting" })
		time.Sleep(2*time.Minute + 10*time.Second)
		stop()
		stop()
		var want strings.Builder
		for _, at := range []string{"2s", "4s", "8s", "16s", "32s", "1m4s", "2m4s"} {
			want.WriteString("lockstep: waiting, " + at + " so far\n")
		}
		if out.String() != want.String() {
			t.Errorf("got\n%swant\n%s", &out, &want)
		}
		quick := Reassure(&out, func() string { return "quick" })
		time.Sleep(patienceFirst - time.Millisecond)
		quick()
		if strings.Contains(out.String(), "quick") {
			t.Error("a progress line was printed for fast work")
		}
	})
}
