package collective

import "github.com/lockstep-ml/lockstep/collective/plan"

// Problem describes a call to a planning algorithm; Algorithm generates the plans of collectives. See package
// plan.
type (
	Problem   = plan.Problem
	Algorithm = plan.Algorithm
	Place     = plan.Place
)

// Step and Links are used by Algorithm.
type (
	Step  = plan.Step
	Links = plan.Links
)
