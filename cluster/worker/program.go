package worker

import (
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// A worker's program is identified by its build information and its executable. Two builds without a version
// control system have the same build information, whatever their code is; so the executables are compared
// where they can be equal.

// program returns the build information of this program: "example.com/digits v1.2.0, revision 1a2b3c,
// modified".
func program() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	text := info.Path
	if v := info.Main.Version; v != "" {
		text += " " + v
	}
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			text += ", revision " + s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			text += ", modified"
		}
	}
	return text
}

// Executable returns the XXH3 hash of this process's executable, in hexadecimal. It detects different builds, not
// forged ones: every worker of a host computes it at its start, which takes 20 times as long with SHA-256.
func Executable() (string, error) {
	path, err := os.Executable()
	if runtime.GOOS == "linux" {
		path, err = "/proc/self/exe", nil // correct even if another file has replaced it
	}
	if err != nil {
		return "", fmt.Errorf("worker: finding this executable: %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("worker: reading this executable: %w", err)
	}
	defer f.Close()
	h, buffer := xxh3.New(), make([]byte, 256<<10)
	if _, err := io.CopyBuffer(h, struct{ io.Reader }{f}, buffer); err != nil {
		return "", fmt.Errorf("worker: reading this executable: %w", err)
	}
	return fmt.Sprintf("%016x", h.Sum64()), nil
}

// platform is the platform of this executable.
const platform = runtime.GOOS + "/" + runtime.GOARCH

// addProgram adds the program's identity to this worker's registration.
func (w *Worker) addProgram(a *info) {
	a.Platform, a.MixedBuilds = platform, w.cfg.MixedBuilds
	if w.cfg.Build != "" {
		return // it replaces the executable's identity
	}
	w.cfg.Build = program()
	var err error
	if a.Executable, err = Executable(); err != nil {
		w.cfg.Logger.Warn("worker: the other workers cannot compare their programs with this one", "error", err)
		a.Executable = "not readable"
	}
}

// checkPrograms compares the programs of all workers. All workers get the same result.
func (w *Worker) checkPrograms() error {
	infos := w.infos
	platforms := map[string][]rendezvous.Registration{}
	of := map[string][][]rendezvous.Fact{}
	all := make([][]rendezvous.Fact, len(w.registrations))
	mixed := true
	for i := range w.registrations {
		a, c := &infos[i], w.registrations[i]
		if a.err != nil {
			return fmt.Errorf("%v has an incompatible registration: %w", &c, a.err)
		}
		mixed = mixed && a.MixedBuilds
		all[i] = []rendezvous.Fact{{Name: "program", Value: c.Build}}
		platforms[a.Platform] = append(platforms[a.Platform], c)
		of[a.Platform] = append(of[a.Platform],
			append(all[i][:1:1], rendezvous.Fact{Name: "executable", Value: a.Executable}))
	}
	err := rendezvous.Differ("build", w.registrations, all)
	for _, name := range slices.Sorted(maps.Keys(platforms)) {
		if err == nil {
			err = rendezvous.Differ("build for "+name, platforms[name], of[name])
		}
	}
	switch {
	case err != nil && mixed:
		w.cfg.Logger.Warn("worker: the workers' programs differ, as allowed by MixedBuilds", "how", err)
	case err != nil:
		return &differs{fmt.Errorf("%w. Start the same executable on all of them or, if the difference is intended, allow "+
			"it on all with --mixed-builds (MixedBuilds)", err)}
	case len(platforms) > 1:
		i := 0
		for infos[i].Platform == infos[0].Platform {
			i++
		}
		w.cfg.Logger.Warn("worker: executables for different platforms cannot be compared; their build information is equal",
			"program", w.registrations[0].Build, infos[0].Platform, w.registrations[0].String(),
			infos[i].Platform, w.registrations[i].String())
	}
	return nil
}
