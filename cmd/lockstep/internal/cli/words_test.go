package cli

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
)

// TestNumbers: a NaN of a diverged run is null in JSON.
func TestNumbers(t *testing.T) {
	text, err := json.Marshal([]Number{1.5, Number(math.NaN()), Number(math.Inf(-1)), 1e-9, 5000000})
	if err != nil || string(text) != "[1.5,null,null,1e-09,5e+06]" {
		t.Errorf("got %s, %v", text, err)
	}
}

func TestGrouped(t *testing.T) {
	for n, want := range map[int]string{
		0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -999: "-999",
		-1000: "-1,000",
	} {
		if got := Grouped(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}

func TestClosest(t *testing.T) {
	names := []string{"epochs", "steps", "seed", "replicas", "global-batch"}
	for word, want := range map[string]string{
		"epoch": "epochs", "epcohs": "epochs", "step": "steps", "replica": "replicas", "globalbatch": "global-batch",
		"sed":    "seed",
		"colour": "", "x": "", "": "", "verbose": "",
	} {
		if got := Closest(word, names); got != want {
			t.Errorf("%s: got %q, want %q", word, got, want)
		}
	}
}

func TestWrapWords(t *testing.T) {
	for _, c := range []struct {
		text    string
		columns int
		want    string
	}{
		{"", 10, ""},
		{"one two three", 20, "one two three"},
		{"one two three", 13, "one two three"},
		{"one two three", 12, "one two|three"},
		{"one two three", 7, "one two|three"},
		{"one two three", 6, "one|two|three"},
		{"one two three", -5, "one|two|three"},
		{"é ü ö", 3, "é ü|ö"},
	} {
		if got := strings.Join(WrapWords(c.text, c.columns), "|"); got != c.want {
			t.Errorf("%q in %d columns: got %q, want %q", c.text, c.columns, got, c.want)
		}
	}
}
