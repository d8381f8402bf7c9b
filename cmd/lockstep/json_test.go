package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// jsonLines is a script command: jsonlines N FIELD... wants standard output to be at least N lines (for N = 1: one),
// each an object in the form of docs/json.md with these fields.
func jsonLines(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	lines := strings.Split(strings.TrimSuffix(ts.ReadFile("stdout"), "\n"), "\n")
	if len(lines) < want || want == 1 && len(lines) != 1 {
		ts.Fatalf("%d lines, want %d", len(lines), want)
	}
	for _, line := range lines {
		var object map[string]any
		if err := json.Unmarshal([]byte(line), &object); err != nil {
			ts.Fatalf("%v: %s", err, line)
		}
		if err := checkJSON("", object); err != nil {
			ts.Fatalf("%v: %s", err, line)
		}
		for _, field := range args[1:] {
			if _, ok := object[field]; !ok {
				ts.Fatalf("no field %s: %s", field, line)
			}
		}
	}
}

var snakeCase = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)

// checkJSON wants names in snake case and numbers as numbers.
func checkJSON(name string, v any) error {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if !snakeCase.MatchString(key) {
				return fmt.Errorf("name %q: want snake_case", key)
			}
			if err := checkJSON(key, value); err != nil {
				return err
			}
		}
	case []any:
		for _, value := range v {
			if err := checkJSON(name, value); err != nil {
				return err
			}
		}
	case string:
		text := name == "value" || name == "holds" // of an environment variable, and an expression
		if _, err := strconv.ParseFloat(v, 64); err == nil && !text {
			return fmt.Errorf("%s is the text %q: want a number", name, v)
		}
	}
	return nil
}

func TestCheckJSON(t *testing.T) {
	for text, ok := range map[string]bool{
		`{"a_b": 1, "c": [{"d2": "x"}]}`: true, `{"aB": 1}`: false, `{"a": [{"b": "1.5"}]}`: false, `{"a": ["7"]}`: false,
	} {
		var v any
		if err := json.Unmarshal([]byte(text), &v); err != nil {
			t.Fatal(err)
		}
		if err := checkJSON("", v); (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
	}
}
