package engines

import "github.com/gomlx/go-xla/installer"

// downloadAccelerator installs the plugin of an accelerator.
func downloadAccelerator(kind, version, folder string, verbosity installer.VerbosityLevel) error {
	if kind == "tpu" {
		return installer.TPUInstall(kind, version, folder, true, verbosity)
	}
	return installer.CudaInstall(kind, version, folder, true, verbosity)
}
