package clitest

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"
)

// ReadPage checks a page that a command wrote: it is well-formed, refers to nothing outside, and has a table behind
// each chart. It returns the page's texts, joined by |, and the JSON in it.
func ReadPage(t *testing.T, file string) (texts, data string) {
	t.Helper()
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	d := xml.NewDecoder(strings.NewReader(string(page)))
	var all []string
	in, charts, tables := "", 0, 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			in = token.Name.Local
			switch in {
			case "link", "img", "iframe", "object":
				t.Errorf("%s: element %s", file, in)
			case "svg":
				charts++
			case "table":
				tables++
			}
			for _, a := range token.Attr {
				if a.Name.Local == "src" || a.Name.Local == "href" && !strings.HasPrefix(a.Value, "#") {
					t.Errorf("%s: %s=%s", file, a.Name.Local, a.Value)
				}
			}
		case xml.CharData:
			text := strings.TrimSpace(string(token))
			switch {
			case in == "script" && data == "":
				data = text
			case in == "style":
				if regexp.MustCompile(`url\(|@import`).MatchString(text) {
					t.Errorf("%s: the style loads something", file)
				}
			case text != "":
				all = append(all, text)
			}
		}
	}
	if charts == 0 || tables < charts {
		t.Errorf("%s: %d charts, %d tables: want a table behind each chart", file, charts, tables)
	}
	return strings.Join(all, "|"), data
}
