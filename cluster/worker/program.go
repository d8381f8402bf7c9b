package worker

import (
	"debug/elf"
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

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

// Executable identifies the build of this process's executable, for users and for a comparison with other workers.
// An ELF executable that the go command has built is identified by the content part of its build ID (what
// go tool buildid prints after the last slash) and by its size, since every worker of a host reads this at its start
// and a large file takes long. Any other executable is identified by the XXH3 hash of the whole file, in hexadecimal.
// Both detect different builds, not forged ones. A Go executable that was changed after the build without changing its
// size is not detected.
func Executable() (string, error) {
	path, err := os.Executable()
	if runtime.GOOS == "linux" {
		path, err = "/proc/self/exe", nil // correct even if another file has replaced it
	}
	if err != nil {
		return "", fmt.Errorf("worker: finding this executable: %w", err)
	}
	return identify(path)
}

// identify is Executable for the executable of that path.
func identify(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("worker: reading this executable: %w", err)
	}
	defer f.Close()
	if id := goBuild(f); id != "" {
		info, err := f.Stat()
		if err != nil {
			return "", fmt.Errorf("worker: reading this executable: %w", err)
		}
		return fmt.Sprintf("Go build %s of %d bytes", id, info.Size()), nil // strip keeps the ID
	}
	h, buffer := xxh3.New(), make([]byte, 256<<10)
	if _, err := io.CopyBuffer(h, struct{ io.Reader }{f}, buffer); err != nil {
		return "", fmt.Errorf("worker: reading this executable: %w", err)
	}
	return fmt.Sprintf("%016x", h.Sum64()), nil
}

// goBuild returns the content part of an ELF file's Go build ID, or "" if the file has no ID of the go command's form:
// another format, no such note, or an ID that -ldflags=-buildid= has set, which may be equal in different builds.
func goBuild(file io.ReaderAt) string {
	f, err := elf.NewFile(file)
	if err != nil {
		return ""
	}
	section := f.Section(".note.go.buildid")
	if section == nil || section.Type != elf.SHT_NOTE || section.Size > 4096 {
		return ""
	}
	note, err := section.Data()
	if err != nil || len(note) < 16 {
		return ""
	}
	// cmd/internal/buildid: the lengths of name and descriptor, the type, and the name "Go".
	length := f.ByteOrder.Uint32(note[4:])
	if f.ByteOrder.Uint32(note) != 4 || f.ByteOrder.Uint32(note[8:]) != 4 || string(note[12:16]) != "Go\x00\x00" ||
		uint64(length) > uint64(len(note)-16) {
		return ""
	}
	return contentID(string(note[16 : 16+length]))
}

// contentID returns the last part of a build ID if the ID has the form that the go command gives executables: four
// parts of 120 bits each in base64, the last of them the hash of the content. The linker writes the first part in its
// place, which the go command then replaces.
func contentID(id string) string {
	parts := strings.Split(id, "/")
	if len(parts) != 4 || parts[0] == parts[3] {
		return ""
	}
	for _, p := range parts {
		if b, err := base64.RawURLEncoding.DecodeString(p); err != nil || len(b) != 15 {
			return ""
		}
	}
	return parts[3]
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
