package gomlx

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// Plugin is a PJRT plugin of this machine, which [OpenXLA] can load.
type Plugin struct {
	Kind string // of its devices: "CPU", "GPU" or "TPU"
	Path string // absolute
	From string // what has named it: an environment variable, or the folder of installed plugins
}

// PluginFolder returns the folder in which go-xla's installer and "lockstep engine install" put plugins of this user.
func PluginFolder() (string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("gomlx: the folder of XLA's plugins: %w", err)
	}
	switch runtime.GOOS {
	case "darwin":
		return filepath.Join(home, "Library", "Application Support", "go-xla"), nil
	case "windows":
		return filepath.Join(home, "AppData", "Local", "go-xla"), nil
	}
	return filepath.Join(home, ".local", "lib", "go-xla"), nil
}

// Plugins returns the plugins of this machine, those of accelerators first, without loading any: the file of
// $LOCKSTEP_XLA_PLUGIN, and those in the folders where go-xla looks: $PJRT_PLUGIN_LIBRARY_PATH, [PluginFolder] and
// /usr/local/lib/go-xla.
func Plugins() []Plugin {
	var found []Plugin
	seen := map[string]bool{}
	add := func(path, from string) {
		real, err := filepath.EvalSymlinks(path)
		if err != nil || seen[real] {
			return
		}
		seen[real] = true
		found = append(found, Plugin{Kind: pluginKind(path), Path: path, From: from})
	}
	if path := os.Getenv(PluginEnv); filepath.IsAbs(path) {
		add(path, "$"+PluginEnv)
	}
	folders := filepath.SplitList(os.Getenv(pluginFoldersEnv))
	if own, err := PluginFolder(); err == nil {
		folders = append(folders, own)
	}
	folders = append(folders, "/usr/local/lib/go-xla")
	for _, folder := range folders {
		for _, f := range []string{folder, filepath.Join(folder, "nvidia")} {
			files, _ := os.ReadDir(f) // most do not exist
			for _, e := range files { // by name: the link to the default version of a plugin comes after the versions
				if pluginFile.MatchString(e.Name()) {
					add(filepath.Join(f, e.Name()), folder)
				}
			}
		}
	}
	slices.SortStableFunc(found, func(a, b Plugin) int { return isCPU(a) - isCPU(b) })
	return found
}

func isCPU(p Plugin) int {
	if p.Kind == "CPU" {
		return 1
	}
	return 0
}

// pluginFoldersEnv is go-xla's environment variable with folders of plugins.
const pluginFoldersEnv = "PJRT_PLUGIN_LIBRARY_PATH"

// pluginFile matches the names of plugins that go-xla finds.
var pluginFile = regexp.MustCompile(`^(pjrt_c_api_\w+_plugin|pjrt_plugin_\w+)\.(so|dylib|dll)$`)

// pluginKind derives a plugin's kind of device from its file name, the only information before it is loaded.
func pluginKind(path string) string {
	name := strings.ToLower(filepath.Base(path))
	for part, kind := range map[string]string{"cuda": "GPU", "rocm": "GPU", "gpu": "GPU", "tpu": "TPU"} {
		if strings.Contains(name, part) {
			return kind
		}
	}
	return "CPU"
}

// Choice is the engine that "auto" takes on this machine.
type Choice struct {
	Engine string // "go" or "xla"
	Plugin string // for xla: the plugin's path
	Why    string // the reason, for the user
}

// Choose returns the engine for the name "auto": XLA with the plugin of an accelerator if one is installed, the machine
// has the accelerator, and the program was built with XLA; otherwise the Go engine.
func Choose() Choice { return choose(Plugins(), builtWithXLA, hasDevice) }

func choose(plugins []Plugin, withXLA bool, hasDevice func(kind string) bool) Choice {
	why := "no plugin of an accelerator is installed"
	for _, p := range plugins {
		switch {
		case p.Kind == "CPU":
		case !withXLA:
			return Choice{Engine: "go", Why: fmt.Sprintf("%s is installed, but this program was built without XLA", p.Path)}
		case !hasDevice(p.Kind):
			why = fmt.Sprintf("%s is installed, but this machine has no %s", p.Path, p.Kind)
		default:
			why = fmt.Sprintf("this machine has a %s, and its plugin is installed", p.Kind)
			return Choice{Engine: "xla", Plugin: p.Path, Why: why}
		}
	}
	return Choice{Engine: "go", Why: why}
}

// hasDevice reports whether the kernel shows an accelerator of a kind.
func hasDevice(kind string) bool {
	patterns := map[string][]string{
		"GPU": {"/dev/nvidia[0-9]*", "/dev/kfd"},
		"TPU": {"/dev/accel[0-9]*", "/dev/vfio/[0-9]*"},
	}[kind]
	return slices.ContainsFunc(patterns, func(p string) bool {
		files, _ := filepath.Glob(p)
		return len(files) > 0
	})
}
