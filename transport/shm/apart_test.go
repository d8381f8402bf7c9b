package shm_test

import (
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/transport/shm"
)

func TestWhyApart(t *testing.T) {
	const a = "boot net:[1] user:[2] 1000 amd64"
	for _, c := range []struct{ b, want string }{
		{a, ""},
		{"boot net:[1] user:[2] 1001 amd64", "different users (1000 and 1001)"},
		{"boot net:[1] user:[3] 0 amd64", "different user namespaces (user:[2] and user:[3]), different users (1000 and 0)"},
		{"boot net:[9] user:[2] 0 amd64", ""},
		{"other net:[1] user:[2] 1001 amd64", ""},
		{"host somewhere", ""},
		{"", ""},
	} {
		if got := shm.WhyApart(a, c.b); got != c.want {
			t.Errorf("%q: got %q, want %q", c.b, got, c.want)
		}
	}
	if id := shm.HostID(); id != "" {
		parts := strings.Fields(id)
		parts[3] = "4294967294"
		if got := shm.WhyApart(id, strings.Join(parts, " ")); !strings.HasPrefix(got, "different users (") {
			t.Errorf("another user of this host: got %q", got)
		}
	}
}
