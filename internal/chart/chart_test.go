package chart_test

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/internal/chart"
)

// texts returns the texts of a picture, and fails if it is not well-formed XML or refers to something outside.
func texts(t interface{ Fatal(...any) }, svg []byte) (out []string) {
	d := xml.NewDecoder(strings.NewReader(string(svg)))
	for {
		token, err := d.Token()
		switch {
		case errors.Is(err, io.EOF):
			return out
		case err != nil:
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			if token.Name.Local == "script" || token.Name.Local == "image" {
				t.Fatal("element ", token.Name.Local)
			}
			for _, a := range token.Attr {
				if a.Name.Local == "href" || a.Name.Space != "xmlns" && a.Name.Local != "xmlns" &&
					strings.Contains(a.Value, "://") {
					t.Fatal("reference ", a.Value)
				}
			}
		case xml.CharData:
			if text := strings.TrimSpace(string(token)); text != "" {
				out = append(out, text)
			}
		}
	}
}

func TestDraw(t *testing.T) {
	c := chart.Chart{
		Title: "a <title>", X: "step", Y: "loss", Lines: []chart.Line{
			{Name: "one & two", X: []float64{1, 2, 3}, Y: []float64{3, math.NaN(), 1}},
			{Name: "bound", X: []float64{1, 3}, Y: []float64{0.5, 0.5}, Limit: true},
		},
	}
	svg, err := chart.Draw("what it \"shows\"", chart.Options{}, c, c)
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(texts(t, svg), "|")
	for _, want := range []string{`what it "shows"`, "a <title>", "one & two", "bound", "step", "loss"} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in %s", want, all)
		}
	}
	themed, err := chart.Draw("", chart.Options{Themed: true}, c)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(themed), "#") || !strings.Contains(string(themed), "var(--line-1)") {
		t.Errorf("fixed colors: %s", themed)
	}
	style := chart.Style()
	for _, name := range []string{"--ink:", "--paper:", "--grid:", "--line-6:"} {
		if strings.Count(style, name) != 2 {
			t.Errorf("%s: want %s for light and dark mode", style, name)
		}
	}
}

func TestDrawErrors(t *testing.T) {
	for want, charts := range map[string][]chart.Chart{
		"no chart to draw":         nil,
		`"empty" has no points`:    {{Title: "empty"}},
		`line "l" has 1 x and 0 y`: {{Lines: []chart.Line{{Name: "l", X: []float64{1}}}}},
		`"log" has no points`: {{
			Title: "log", LogY: true,
			Lines: []chart.Line{{X: []float64{1}, Y: []float64{0}}},
		}},
	} {
		if _, err := chart.Draw("", chart.Options{}, charts...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestDrawAnything draws any points without a panic.
func TestDrawAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := chart.Chart{LogX: rapid.Bool().Draw(t, "log x"), LogY: rapid.Bool().Draw(t, "log y")}
		value := rapid.OneOf(rapid.Float64Range(-1e12, 1e12), rapid.SampledFrom([]float64{
			0, 1, 1, math.NaN(), math.Inf(1), math.SmallestNonzeroFloat64, 1e-300, 1e300,
		}))
		for range rapid.IntRange(1, 3).Draw(t, "lines") {
			n := rapid.IntRange(0, 50).Draw(t, "points")
			c.Lines = append(c.Lines, chart.Line{
				Name: rapid.String().Draw(t, "name"),
				X:    rapid.SliceOfN(value, n, n).Draw(t, "x"), Y: rapid.SliceOfN(value, n, n).Draw(t, "y"),
			})
		}
		if svg, err := chart.Draw("x", chart.Options{}, c); err == nil {
			if len(svg) > 1<<20 {
				t.Fatalf("%d bytes", len(svg))
			}
		}
	})
}
