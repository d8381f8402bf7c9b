package inspect

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// notForUsers are variables that a program sets for its child processes.
var notForUsers = []string{"LOCKSTEP_BENCH_WORKER", "LOCKSTEP_SLEEPS"}

// TestVariablesAreListed: lockstep doctor --env lists exactly the variables that the code names.
func TestVariablesAreListed(t *testing.T) {
	name := regexp.MustCompile(`"(LOCKSTEP_[A-Z_]+[A-Z])"`)
	inCode := map[string]bool{}
	err := filepath.WalkDir("../../../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") ||
			filepath.Base(path) == "environment.go" || strings.Contains(path, "test/") || strings.Contains(path, "/tools/") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range name.FindAllStringSubmatch(string(text), -1) {
			inCode[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for v := range inCode {
		listed := slices.ContainsFunc(variables, func(l variable) bool { return l.Name == v })
		if !listed && !slices.Contains(notForUsers, v) {
			t.Errorf("%s is read, and not listed", v)
		}
	}
	for _, v := range variables {
		if !inCode[v.Name] {
			t.Errorf("%s is listed, and the code does not name it", v.Name)
		}
	}
}
