//go:build xla && cgo

package gomlx

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/gomlx/go-xla/compute/xla"
	"github.com/gomlx/go-xla/pjrt"

	"github.com/lockstep-ml/lockstep/engine"
)

const builtWithXLA = true

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
	if path == "" {
		installed := Plugins()
		i := slices.IndexFunc(installed, func(p Plugin) bool { return p.Kind == "CPU" || hasDevice(p.Kind) })
		if i < 0 {
			return "", fmt.Errorf("gomlx: XLA needs a PJRT plugin, and none for this machine is installed: run \"lockstep "+
				"engine install cpu\" (or cuda12, cuda13, tpu), or set XLAOptions.Plugin or $%s to the absolute path of one",
				PluginEnv)
		}
		path, from = installed[i].Path, installed[i].From
	}
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("gomlx: the PJRT plugin %q of %s is not an absolute path", path, from)
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("gomlx: the PJRT plugin of %s: %w", from, err)
	}
	return path, nil
}
