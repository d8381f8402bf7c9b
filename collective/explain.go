package collective

import (
	"github.com/lockstep-ml/lockstep/collective/chooser"
)

// Explain describes, as text, which algorithm a communicator with this configuration would choose for a
// problem, and why. The environment variables apply as they do in [Open]. If the problem is Private, peers
// cannot access the memory of all ranks.
func Explain(cfg Config, p Problem, w chooser.Where) (string, error) {
	reason := "the configuration selects it"
	if cfg.Algorithm == "" {
		reason = "LOCKSTEP_ALGORITHM selects it"
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
	if p.Private && row.Fits(p) != nil { // known only after all ranks have entered the call
		if row, err = prefer.choose(cfg.Chooser, p, w); err != nil {
			return "", err
		}
	}
	switch table, err := cfg.Chooser.Choose(p, w); {
	case row.Name == prefer.of[p.Op] || row.Name == prefer.all:
		return cfg.Chooser.Explain(p, w, row.Name, reason), nil
	case err == nil && row.Name != table.Name:
		const why = "it is chosen before the memory is known, and supports private memory"
		return cfg.Chooser.Explain(p, w, row.Name, why), nil
	}
	return cfg.Chooser.Explain(p, w, "", ""), nil
}
