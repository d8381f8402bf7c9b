package collective

import (
	"github.com/lockstep-ml/lockstep/collective/chooser"
)

// Explain says which algorithm a communicator of a configuration would take for a problem, and why, as a text: the
// environment variables count as they do in [Open]. If the problem is Private, the ranks' memories are such that their peers do
// not reach them.
func Explain(cfg Config, p Problem, w chooser.Where) (string, error) {
	asked := "the configuration asks for it"
	if cfg.Algorithm == "" {
		asked = "LOCKSTEP_ALGORITHM asks for it"
	}
	cfg, err := cfg.filled()
	if err != nil {
		return "", err
	}
	prefer, err := parsePreference(cfg.Algorithm)
	if err != nil {
		return "", err
	}
	open := p
	open.Private = false
	row, err := prefer.choose(cfg.Chooser, open, w)
	if err != nil {
		return "", err
	}
	if p.Private && row.Fits(p) != nil { // which a rank finds out when all have come to the call
		if row, err = prefer.choose(cfg.Chooser, p, w); err != nil {
			return "", err
		}
	}
	switch table, err := cfg.Chooser.Choose(p, w); {
	case row.Name == prefer.of[p.Op] || row.Name == prefer.all:
		return cfg.Chooser.Explain(p, w, row.Name, asked), nil
	case err == nil && row.Name != table.Name:
		return cfg.Chooser.Explain(p, w, row.Name, "it is chosen before memory is looked at, and does for such as this"), nil
	}
	return cfg.Chooser.Explain(p, w, "", ""), nil
}
