package main

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
)

// asProgram makes the test binary be the program.
const asProgram = "LOCKSTEP_EXAMPLE_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestProgram(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	found := regexp.MustCompile(`(?m)^MirroredStrategy\(.*\): accuracy (\S+) % on 1000 new darts$`).FindSubmatch(out)
	if found == nil {
		t.Fatalf("got\n%s", out)
	}
	if accuracy, err := strconv.ParseFloat(string(found[1]), 64); err != nil || accuracy < 90 {
		t.Errorf("accuracy %s %%, want at least 90 (one ring alone has less than 60)\n%s", found[1], out)
	}
}
