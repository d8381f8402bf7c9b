package secret

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/cluster/private"
)

// OfHost returns a secret that all processes of this user on this host share, and no other user has: the
// first process creates it, in [private.Folder]. The workers of a job on one host without a secret
// authenticate each other with it.
func OfHost() (Secret, error) {
	text, err := private.Key()
	if err != nil {
		return Secret{}, fmt.Errorf("secret: this host's: %w", err)
	}
	return Parse(text)
}
