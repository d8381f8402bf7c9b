package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// bindHelp describes a flag --bind-to of a command that binds who, such as "each worker".
func bindHelp(who string) string {
	return "bind " + who + " to CPUs by this `policy`: share (equal parts of the cores), core (one core), numa (one " +
		"NUMA node) or none; with fewer CPUs than processes share and core bind none"
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
