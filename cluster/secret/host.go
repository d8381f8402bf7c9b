package secret

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/cluster/private"
)

// OfHost returns the secret that all processes of this user on this host have in common, and nobody else has: the first
// one makes it, in [private.Folder]. The workers of a job on one host that was given no secret know each other by it.
func OfHost() (Secret, error) {
	text, err := private.Key()
	if err != nil {
		return Secret{}, fmt.Errorf("secret: this host's: %w", err)
	}
	return Parse(text)
}
