package secret

import (
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster"
)

// Secret is a job's secret. It is always printed as "[secret]": only [Secret.Text] returns the text. The zero
// Secret is none.
type Secret struct {
	open func() *kept // a function, since package fmt follows pointers, and does not call String on fields
}

type kept struct {
	text string
	root []byte // all keys are derived from it
}

const (
	// textMin is the minimum length: as many random letters and digits cannot be guessed.
	textMin = 16
	textMax = 4 << 10
	// keyBytes is the length of every key, and of a challenge.
	keyBytes = 32
)

// howTo explains how to create a secret.
const howTo = "make one with `openssl rand -hex 32`, and give it to every worker"

// New returns a random secret of more than 256 bits.
func New() Secret {
	s, err := Parse(rand.Text() + rand.Text())
	if err != nil {
		panic(err) // both are 26 letters
	}
	return s
}

// Parse returns the secret with a text of at least 16 characters, not counting surrounding white space. The
// text should be random, since guesses can be tested against a recorded connection.
func Parse(text string) (Secret, error) {
	text = strings.TrimSpace(text)
	switch {
	case text == "":
		return Secret{}, errors.New("the secret is empty: " + howTo)
	case len(text) < textMin:
		return Secret{}, fmt.Errorf("the secret has %d characters, want at least %d: %s", len(text), textMin, howTo)
	case len(text) > textMax:
		return Secret{}, fmt.Errorf("the secret has %d bytes, want at most %d", len(text), textMax)
	}
	root, err := hkdf.Extract(sha256.New, []byte(text), []byte("lockstep secret 1"))
	if err != nil {
		return Secret{}, fmt.Errorf("secret: deriving keys: %w", err)
	}
	k := &kept{text, root}
	return Secret{func() *kept { return k }}, nil
}

// FromEnvironment returns the secret in LOCKSTEP_SECRET, or in the file named by LOCKSTEP_SECRET_FILE, and
// whether there is one. An empty variable, an unreadable file, and two different secrets are errors. Pass
// [os.LookupEnv] and [cluster.ReadFile] as getenv and readFile.
func FromEnvironment(getenv func(string) (string, bool), readFile func(string) ([]byte, error)) (Secret, bool, error) {
	var direct, filed Secret
	text, given := getenv(cluster.EnvSecret)
	path, inFile := getenv(cluster.EnvSecretFile)
	if given {
		var err error
		if direct, err = Parse(text); err != nil {
			return Secret{}, false, fmt.Errorf("%s: %w", cluster.EnvSecret, err)
		}
	}
	if inFile {
		b, err := readFile(path)
		if err == nil {
			filed, err = Parse(string(b))
		}
		if err != nil {
			return Secret{}, false, fmt.Errorf("%s names %q: %w", cluster.EnvSecretFile, path, err)
		}
	}
	switch {
	case given && inFile && direct.Text() != filed.Text():
		return Secret{}, false, fmt.Errorf("%s and the file %q that %s names hold different secrets: unset one of them",
			cluster.EnvSecret, path, cluster.EnvSecretFile)
	case given:
		return direct, true, nil
	}
	return filed, inFile, nil
}

// Given reports whether there is a secret: false for the zero Secret.
func (s Secret) Given() bool { return s.open != nil }

// Text returns the secret itself, for passing it to another worker. Do not write it to a log, argument list
// or message.
func (s Secret) Text() string {
	if s.open == nil {
		return ""
	}
	return s.open().text
}

// String returns "[secret]", or "[no secret]".
func (s Secret) String() string {
	if s.open == nil {
		return "[no secret]"
	}
	return "[secret]"
}

// GoString is String, for the verb %#v.
func (s Secret) GoString() string { return s.String() }

// derive returns the key of a path. Different paths have different keys, even if their concatenations are
// equal.
func (s Secret) derive(path ...string) []byte {
	if s.open == nil {
		panic("secret: a key of the zero Secret")
	}
	var info []byte
	for _, p := range path {
		info = append(binary.BigEndian.AppendUint32(info, uint32(len(p))), p...)
	}
	key, err := hkdf.Expand(sha256.New, s.open().root, string(info), keyBytes)
	if err != nil {
		panic(err) // only of a length that is too large
	}
	return key
}
