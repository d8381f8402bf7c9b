package gomlx

import (
	"github.com/gomlx/compute"

	"github.com/lockstep-ml/lockstep/engine"
)

// Staged returns options for an engine that copies between host and device memory although it need not.
func Staged(o XLAOptions) XLAOptions {
	o.staged = true
	return o
}

// ComputeBackend returns the compute backend of an engine.
func ComputeBackend(e engine.Engine) compute.Backend { return e.(*backend).Backend }

// Versions returns the part of a description that lists the versions of the modules that compute.
var Versions = map[string]string{
	"github.com/gomlx/gomlx": gomlxVersion, "github.com/gomlx/compute": computeVersion,
	"github.com/gomlx/go-xla": goXLAVersion,
}
