package collective

import "github.com/lockstep-ml/lockstep/collective/plan"

// Problem is what a plan solves; Algorithm is a way to carry out collectives. See package plan.
type (
	Problem   = plan.Problem
	Algorithm = plan.Algorithm
	Place     = plan.Place
)

// Step and Links belong to it.
type (
	Step  = plan.Step
	Links = plan.Links
)
