package secret

import (
	"encoding/hex"
	"testing"
)

// TestKeys: other builds derive the same keys, and other secrets and paths have other keys, even if the concatenations
// of the paths are equal.
func TestKeys(t *testing.T) {
	const text = "0123456789abcdef"
	seen := map[string][]string{}
	for _, text := range []string{text, text + "x"} {
		s, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range [][]string{
			{"challenge", "store", "job", "\x00\x00\x00\x00"},
			{"challenge", "group", "job", "\x00\x00\x00\x00"},
			{"challenge", "group", "job", "\x00\x00\x00\x01"},
			{"challenge", "groupj", "ob", "\x00\x00\x00\x00"},
			{"authority", "job"},
			{"authorityjob"},
			{"authorityjob", ""},
			{},
		} {
			key := s.derive(path...)
			if before, ok := seen[string(key)]; ok || len(key) != 32 {
				t.Errorf("the key of %q is that of %q", path, before)
			}
			seen[string(key)] = path
		}
	}
	s, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	const want = "084a78ac87e20610016197b39ff6c67b803a84d03e3c040282287bcde64b57ec" // by another implementation of HKDF
	if got := hex.EncodeToString(s.derive("challenge", "store", "job", "\x00\x00\x00\x00")); got != want {
		t.Errorf("the key is %s, want %s as in every build", got, want)
	}
}
