//go:build xla && cgo

package gomlx

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gomlx/go-xla/compute/xla"
	"github.com/gomlx/go-xla/pjrt"

	"github.com/lockstep-ml/lockstep/engine"
)

// OpenXLA opens XLA through a PJRT plugin, given by its absolute path. It never downloads one. A CPU plugin
// offers the requested number of devices; its threads use all cores in any case. An accelerator's plugin
// offers the devices that it finds. The caller must close the engine.
func OpenXLA(o XLAOptions) (engine.Engine, error) {
	path, err := o.plugin()
	if err != nil {
		return nil, err
	}
	n, err := deviceCount(o.Devices)
	if err != nil {
		return nil, err
	}
	keepPages()
	xla.EnableAutoInstall(false)
	kind, config, options := pluginKind(path), path, pjrt.NamedValuesMap{}
	if kind == "CPU" {
		options["cpu_device_count"] = int64(n) // XLA rejects other integer types
		config += ",shared_buffers"
		if o.staged {
			config = path + ",noshared_buffers"
		}
	}
	b, err := xla.NewWithOptions(config, options)
	if err != nil {
		return nil, fmt.Errorf("gomlx: open the PJRT plugin %s: %w", path, err)
	}
	return &backend{
		Backend:     b,
		name:        "xla",
		description: fmt.Sprintf("GoMLX %s, XLA (go-xla %s, plugin %s)", gomlxVersion, goXLAVersion, filepath.Base(path)),
		kind:        kind,
		devices:     b.NumDevices(),
		physical:    true,
		whole:       true,
	}, nil
}

// plugin returns the path of the plugin, or an error with the setting that is missing.
func (o XLAOptions) plugin() (string, error) {
	path, from := o.Plugin, "XLAOptions.Plugin"
	if path == "" {
		path, from = os.Getenv(PluginEnv), "$"+PluginEnv
	}
	switch {
	case path == "":
		return "", fmt.Errorf("gomlx: XLA needs a PJRT plugin: set XLAOptions.Plugin or $%s to the absolute path of one, "+
			"such as pjrt_c_api_cpu_plugin.so", PluginEnv)
	case !strings.HasPrefix(path, "/"):
		return "", fmt.Errorf("gomlx: the PJRT plugin %q of %s is not an absolute path", path, from)
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("gomlx: the PJRT plugin of %s: %w", from, err)
	}
	return path, nil
}

// pluginKind derives a plugin's kind of device from its file name, the only information before it is loaded.
func pluginKind(path string) string {
	name := strings.ToLower(filepath.Base(path))
	switch {
	case pjrt.IsCUDAName(name), strings.Contains(name, "rocm"), strings.Contains(name, "gpu"):
		return "GPU"
	case strings.Contains(name, "tpu"):
		return "TPU"
	}
	return "CPU"
}
