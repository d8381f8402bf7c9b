package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// bindHelp describes a flag --bind-to; who is bound.
func bindHelp(who string) string {
	return "bind " + who + " to its share of the cores: `policy` share (equal parts of them), core (one core), numa " +
		"(one NUMA node) or none; with more of them than CPUs none is bound"
}

// checkBind validates a flag --bind-to.
func checkBind(policy string) error {
	if slices.Contains(affinity.Policies(), affinity.Policy(policy)) {
		return nil
	}
	var names []string
	for _, p := range affinity.Policies() {
		names = append(names, string(p))
	}
	last := len(names) - 1
	return usagef("--bind-to %s: want %s", policy, fmt.Sprintf("%s or %s", strings.Join(names[:last], ", "), names[last]))
}
