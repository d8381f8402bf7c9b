package secret_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/secret"
)

const text = "0123456789abcdef0123456789abcdef"

func parsed(t testing.TB, text string) secret.Secret {
	t.Helper()
	s, err := secret.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestParse(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", "the secret is empty"},
		{" \n", "the secret is empty"},
		{"0123456789abcde\n", "has 15 characters, want at least 16"},
		{strings.Repeat("x", 5000), "has 5000 bytes, want at most 4096"},
	} {
		if _, err := secret.Parse(c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.text, err, c.want)
		}
	}
	if s := parsed(t, "  "+text+"\n"); s.Text() != text {
		t.Errorf("the text is %q, want it without the space around it", s.Text())
	}
	a, b := secret.New(), secret.New()
	if a.Text() == b.Text() || len(a.Text()) < 50 {
		t.Error("new secrets are equal, or short")
	}
}

func TestFromEnvironment(t *testing.T) {
	files := map[string]string{"/ok": text + "\n", "/short": "short", "/other": strings.Repeat("o", 20)}
	for _, c := range []struct {
		name string
		env  map[string]string
		want string // of the error; "given", or "none"
	}{
		{"nothing", nil, "none"},
		{"a text", map[string]string{cluster.EnvSecret: text}, "given"},
		{"a file", map[string]string{cluster.EnvSecretFile: "/ok"}, "given"},
		{"both, equal", map[string]string{cluster.EnvSecret: text, cluster.EnvSecretFile: "/ok"}, "given"},
		{
			"both, not equal",
			map[string]string{cluster.EnvSecret: text, cluster.EnvSecretFile: "/other"},
			"hold different secrets",
		},
		{"an empty text", map[string]string{cluster.EnvSecret: ""}, "LOCKSTEP_SECRET: the secret is empty"},
		{"an empty name", map[string]string{cluster.EnvSecretFile: ""}, `LOCKSTEP_SECRET_FILE names ""`},
		{
			"no such file",
			map[string]string{cluster.EnvSecretFile: "/none"},
			`LOCKSTEP_SECRET_FILE names "/none": file does not exist`,
		},
		{"a short file", map[string]string{cluster.EnvSecretFile: "/short"}, `"/short": the secret has 5 characters`},
	} {
		s, given, err := secret.FromEnvironment(
			func(name string) (string, bool) { v, ok := c.env[name]; return v, ok },
			func(path string) ([]byte, error) {
				if b, ok := files[path]; ok {
					return []byte(b), nil
				}
				return nil, os.ErrNotExist
			})
		got := map[bool]string{true: "given", false: "none"}[given]
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, c.want) || given != s.Given() || given && s.Text() != text {
			t.Errorf("%s: %s, %v, want %s", c.name, got, s, c.want)
		}
		if err != nil && c.env[cluster.EnvSecret] != "" && strings.Contains(err.Error(), text) {
			t.Errorf("%s: the error gives the secret away", c.name)
		}
	}
}

// TestPrinting: a secret is not printed, whatever the verb, and whatever contains it.
func TestPrinting(t *testing.T) {
	s := parsed(t, text)
	hidden := struct{ s secret.Secret }{s}
	var out bytes.Buffer
	for _, v := range []any{
		s, &s, hidden, &hidden,
		[]secret.Secret{s},
		map[string]secret.Secret{"s": s},
		fmt.Errorf("of %v", s),
	} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		json.NewEncoder(&out).Encode(v)
		slog.New(slog.NewTextHandler(&out, nil)).Info("starting", "secret", v)
		slog.New(slog.NewJSONHandler(&out, nil)).Info("starting", "secret", v)
	}
	for _, form := range []string{text, hex.EncodeToString([]byte(text)), fmt.Sprint([]byte(text))} {
		if strings.Contains(out.String(), form) {
			t.Errorf("printed: %s", out.String())
		}
	}
	if s.String() != "[secret]" || (secret.Secret{}).String() != "[no secret]" {
		t.Errorf("%v and %v", s, secret.Secret{})
	}
}

func TestZero(t *testing.T) {
	defer func() {
		if r := recover(); r != "secret: a key of the zero Secret" {
			t.Errorf("panic %v", r)
		}
	}()
	var s secret.Secret
	if s.Given() || s.Text() != "" {
		t.Error("the zero Secret is one")
	}
	s.Authenticate(secret.Store, "job", 0)
	t.Error("the zero Secret has keys")
}
