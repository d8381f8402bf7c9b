package main

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	var out strings.Builder
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^MirroredStrategy\(.*\): accuracy (\S+) % on 1000 new points$`).FindStringSubmatch(out.String())
	if found == nil {
		t.Fatalf("got\n%s", out.String())
	}
	if accuracy, err := strconv.ParseFloat(found[1], 64); err != nil || accuracy < 95 {
		t.Errorf("accuracy %s %%, want at least 95", found[1])
	}
}
