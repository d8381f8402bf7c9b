// Package engines lists the compute engines, and installs plugins for XLA.
package engines

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gomlx/go-xla/installer"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// pluginKinds are the plugins that lockstep engine install knows.
var pluginKinds = []string{"cpu", "cuda12", "cuda13", "tpu"}

// New returns lockstep engine.
func New() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "List the compute engines, and install XLA's plugins",
		Long: `Engine lists the compute engines of this build and machine, and installs plugins
for XLA. The Go engine is built in. XLA needs a build with cgo and -tags xla, and
a plugin for the processor or the accelerator.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newEngineList(), newEngineInstall())
	return cmd
}

// listed is an engine as lockstep engine list shows it.
type listed struct {
	Engine  string `json:"engine"`
	Devices string `json:"devices"`
	Path    string `json:"path,omitempty"` // of the plugin
	From    string `json:"from"`           // what has named the plugin
	Auto    bool   `json:"auto"`           // --engine auto takes it
	Why     string `json:"why,omitempty"`  // with Auto
}

func newEngineList() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the engines and plugins, and which one --engine auto takes",
		Long: `List shows the Go engine, and the plugins for XLA with the files that would be
loaded: that of $LOCKSTEP_XLA_PLUGIN, and those in $PJRT_PLUGIN_LIBRARY_PATH, in
the folder of lockstep engine install, and in /usr/local/lib/go-xla. It loads
none. The last line says which engine --engine auto takes, and why.`,
		Example: "  lockstep engine list\n  lockstep engine list --format json",
		Args:    cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printEngines(cmd.OutOrStdout(), format, gomlx.Plugins(), gomlx.Choose())
		},
	}
	cli.ChoiceVar(cmd.Flags(), &format, "format", "table", "", "table", "json")
	return cmd
}

func printEngines(w io.Writer, format string, plugins []gomlx.Plugin, choice gomlx.Choice) error {
	all := []listed{{Engine: "go", Devices: "CPU", From: "built in", Auto: choice.Engine == "go"}}
	for _, p := range plugins {
		all = append(all, listed{
			Engine: "xla", Devices: p.Kind, Path: p.Path, From: p.From,
			Auto: choice.Engine == "xla" && choice.Plugin == p.Path,
		})
	}
	if format == "json" {
		for _, e := range all {
			if e.Auto {
				e.Why = choice.Why
			}
			if err := cli.WriteJSON(w, e); err != nil {
				return err
			}
		}
		return nil
	}
	var t cli.Table
	for _, e := range all {
		switch {
		case e.Path == "":
			t.Row(e.Engine, "%s, %s", e.Devices, e.From)
		case strings.HasPrefix(e.From, "$"):
			t.Row(e.Engine, "%s: %s, from %s", e.Devices, e.Path, e.From)
		default:
			t.Row(e.Engine, "%s: %s", e.Devices, e.Path)
		}
	}
	t.Row("auto", "is %s: %s", choice.Engine, choice.Why)
	return t.Print(w)
}

func newEngineInstall() *cobra.Command {
	var version, folder string
	var wheels []string
	cmd := &cobra.Command{
		Use:   "install " + cli.OneOf(pluginKinds),
		Short: "Install a plugin for XLA",
		Long: `Install downloads a plugin for XLA, by go-xla's installer, into the folder where
--engine xla and every program with go-xla find it. cuda12, cuda13 and tpu come
from Python's package registry, which JAX's team fills; each file is compared
with the checksum of the registry. cpu comes from a release of go-xla's project,
which has no checksums.

On a machine without a network, --wheel takes wheels that were downloaded
elsewhere (pip download --no-deps jax-cuda13-pjrt nvidia-...): that of the plugin
and, for CUDA, those of NVIDIA's libraries. Each file is compared with the
checksum in its wheel.`,
		Example: `  lockstep engine install cpu
  lockstep engine install cuda13
  lockstep engine install tpu --wheel libtpu-0.0.24-py3-none-manylinux_2_31_x86_64.whl`,
		ValidArgs: pluginKinds,
		Args:      cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			kind := args[0]
			if !slices.Contains(pluginKinds, kind) {
				return cli.Usagef("%s: want %s", kind, cli.OneOf(pluginKinds))
			}
			if folder == "" {
				if folder, err = gomlx.PluginFolder(); err != nil {
					return err
				}
			}
			if len(wheels) > 0 {
				err = installWheels(kind, wheels, folder)
			} else {
				err = download(kind, version, folder)
			}
			if err != nil {
				return fmt.Errorf("install XLA's plugin for %s: %w", kind, err)
			}
			return printEngines(cmd.OutOrStdout(), "table", gomlx.Plugins(), gomlx.Choose())
		},
	}
	f := cmd.Flags()
	f.StringVar(&version, "version", "latest", "version of the plugin to download")
	f.StringVar(&folder, "folder", "", "folder to install into (default: where go-xla looks in the home folder)")
	f.StringArrayVar(&wheels, "wheel", nil, "install this wheel `file` instead of downloading; may be repeated")
	return cmd
}

// download downloads and installs a plugin by go-xla's installer, which shows its progress on standard output.
func download(kind, version, folder string) error {
	verbosity := installer.Normal
	if kind == "cpu" {
		return installer.CPUInstall(runtime.GOOS+"_"+runtime.GOARCH, version, folder, true, verbosity)
	}
	return downloadAccelerator(kind, version, folder, verbosity)
}

// The names under which go-xla finds the plugins in its folder, and under which wheels have them.
var pluginFiles = map[string]struct{ inWheel, installed string }{
	"cpu":    {"pjrt_c_api_cpu_plugin.so", "pjrt_c_api_cpu_plugin.so"},
	"cuda12": {"xla_cuda_plugin.so", "nvidia/pjrt_c_api_cuda_plugin.so"},
	"cuda13": {"xla_cuda_plugin.so", "nvidia/pjrt_c_api_cuda_plugin.so"},
	"tpu":    {"libtpu.so", "pjrt_c_api_tpu_plugin.so"},
}

// installWheels installs a plugin, and NVIDIA's libraries, from wheels.
func installWheels(kind string, wheels []string, folder string) error {
	names := pluginFiles[kind]
	plugins := 0
	for _, wheel := range wheels {
		n, err := extractWheel(wheel, func(name string) string {
			switch {
			case filepath.Base(name) == names.inWheel:
				plugins++
				return filepath.Join(folder, filepath.FromSlash(names.installed))
			case names.installed != filepath.Base(names.installed) && isNVIDIA(name):
				return filepath.Join(folder, filepath.FromSlash(name))
			}
			return ""
		})
		if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("the wheel %s has neither the plugin %s nor libraries of NVIDIA", wheel, names.inWheel)
		}
	}
	if plugins == 0 {
		return fmt.Errorf("no wheel has the plugin %s: give the one of %s too", names.inWheel, wheelOf[kind])
	}
	return linkNVIDIA(kind, folder)
}

// wheelOf names the Python package with each plugin.
var wheelOf = map[string]string{
	"cpu": "a build of XLA's CPU plugin", "cuda12": "jax-cuda12-pjrt", "cuda13": "jax-cuda13-pjrt", "tpu": "libtpu",
}

// linkNVIDIA makes the links that go-xla's installer makes: CUDA looks for ptxas and cuBLAS there.
func linkNVIDIA(kind, folder string) error {
	links := map[string]string{}
	switch kind {
	case "cuda12":
		links["nvidia/bin/ptxas"] = "../cuda_nvcc/bin/ptxas"
	case "cuda13":
		links["nvidia/bin/ptxas"] = "../cu13/bin/ptxas"
		for _, library := range []string{"libcublasLt.so.13", "libcublas.so.13"} {
			links["../"+library] = filepath.Join(filepath.Base(folder), "nvidia", "cu13", "lib", library)
		}
	}
	for link, target := range links {
		link = filepath.Join(folder, link)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			return err
		}
		if err := os.Remove(link); err != nil && !os.IsNotExist(err) {
			return err
		}
		if err := os.Symlink(target, link); err != nil {
			return err
		}
	}
	return nil
}
