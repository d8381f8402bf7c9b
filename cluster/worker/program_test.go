package worker

import (
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestPrograms: executables are compared among the workers of one platform. Differences must be allowed on all
// workers.
func TestPrograms(t *testing.T) {
	type one struct {
		build string
		info
	}
	on := func(build, platform, executable string, mixed bool) one {
		return one{build, info{Platform: platform, Executable: executable, MixedBuilds: mixed}}
	}
	for name, c := range map[string]struct {
		all  []one
		want string // of the error; "": there is none
		logs string
	}{
		"alike": {all: []one{on("p", "linux/amd64", "a", false), on("p", "linux/amd64", "a", false)}},
		"other code": {
			all:  []one{on("p", "linux/amd64", "a", false), on("p", "linux/amd64", "b", false)},
			want: `executable is "a" for worker 0 (host h, pid 0), but "b" for worker 1 (host h, pid 1)`,
		},
		"allowed": {
			all:  []one{on("p", "linux/amd64", "a", true), on("p", "linux/amd64", "b", true)},
			logs: "as allowed by MixedBuilds",
		},
		"allowed by one": {
			all:  []one{on("p", "linux/amd64", "a", true), on("p", "linux/amd64", "b", false)},
			want: `allow it on all`,
		},
		"two platforms": {
			all:  []one{on("p", "linux/amd64", "a", false), on("p", "linux/arm64", "b", false)},
			logs: `linux/amd64="worker 0 (host h, pid 0)" linux/arm64="worker 1 (host h, pid 1)"`,
		},
		"other revisions": {
			all:  []one{on("p 1", "linux/amd64", "a", false), on("p 2", "linux/arm64", "b", false)},
			want: `program is "p 1" for worker 0 (host h, pid 0), but "p 2" for worker 1 (host h, pid 1)`,
		},
		"one of three, there": {
			all: []one{
				on("p", "linux/arm64", "x", false), on("p", "linux/amd64", "a", false),
				on("p", "linux/amd64", "b", false),
			},
			want: `"build for linux/amd64": executable is "a" for worker 1 (host h, pid 1), ` +
				`but "b" for worker 2 (host h, pid 2)`,
		},
		"by its name": {all: []one{on("mine", "linux/amd64", "", false), on("mine", "linux/amd64", "", false)}},
	} {
		t.Run(name, func(t *testing.T) {
			var logs strings.Builder
			w := &Worker{cfg: Config{Logger: slog.New(slog.NewTextHandler(&logs, nil))}, session: newSession()}
			for i, o := range c.all {
				data, err := json.Marshal(o.info)
				if err != nil {
					t.Fatal(err)
				}
				w.registrations = append(w.registrations,
					rendezvous.Registration{Worker: i, Host: "h", PID: i, Build: o.build, Data: data})
			}
			w.infos = decodeInfos(w.registrations)
			switch err := w.checkPrograms(); {
			case c.want == "" && err != nil, c.want != "" &&
				(err == nil || !errors.Is(err, ErrDiffer) || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got %v, want %s", err, c.want)
			}
			if (logs.Len() > 0) != (c.logs != "") || !strings.Contains(logs.String(), c.logs) {
				t.Errorf("it logs %s, want %s", &logs, c.logs)
			}
		})
	}
}
