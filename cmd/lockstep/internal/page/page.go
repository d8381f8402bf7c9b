// Package page writes the HTML pages of commands: reports, with charts and tables.
package page

import (
	"cmp"
	"embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"slices"

	"github.com/lockstep-ml/lockstep/internal/chart"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

//go:embed pages
var pageFiles embed.FS

// Table is a table of a page, behind a chart.
type Table struct {
	Caption string
	Head    []string
	Rows    [][]string
}

// Pairs is a table of names and texts.
type Pairs struct {
	Caption string
	Rows    [][2]string
}

// Chart is a chart of a page, with its numbers as a table.
type Chart struct {
	SVG   template.HTML
	Table Table
}

// NewChart draws charts and lists their points.
func NewChart(description string, width, height float64, c chart.Chart) (Chart, error) {
	svg, err := chart.Draw(description, chart.Options{Width: width, Height: height, Themed: true}, c)
	if err != nil {
		return Chart{}, err
	}
	return Chart{template.HTML(svg), tableOf(c)}, nil // by package chart, which escapes the texts
}

// Write executes a template of pages within the layout, and writes one HTML file without outside references.
func Write(file, name string, content any) error {
	t, err := template.New("").ParseFS(pageFiles, "pages/layout.html", "pages/"+name)
	if err != nil {
		return err
	}
	return checkpoint.WriteFile(file, func(w io.Writer) error { return t.ExecuteTemplate(w, "layout", content) })
}

// Style is the part of the style that charts share.
func Style() template.CSS { return template.CSS(chart.Style()) }

// tableOf lists the points of a chart, at most tableRows of them.
func tableOf(c chart.Chart) Table {
	const tableRows = 64
	t := Table{Caption: c.Title, Head: []string{c.X}}
	values := map[float64][]string{}
	for i, l := range c.Lines {
		t.Head = append(t.Head, l.Name)
		for k, x := range l.X {
			if values[x] == nil {
				values[x] = make([]string, len(c.Lines))
			}
			values[x][i] = fmt.Sprintf("%.5g", l.Y[k])
		}
	}
	all := slices.Sorted(maps.Keys(values))
	every := (len(all) + tableRows - 1) / tableRows
	for i, x := range all {
		complete := len(c.Lines) > 1 && !slices.Contains(values[x], "") // such as the end of an epoch
		if i%max(every, 1) == 0 || i == len(all)-1 || complete {
			t.Rows = append(t.Rows, append([]string{fmt.Sprintf("%.6g", x)}, values[x]...))
		}
	}
	if every > 1 {
		t.Caption += fmt.Sprintf(", every %s point", ordinal(every))
	}
	return t
}

func ordinal(n int) string {
	suffix := "th"
	if n%100 < 11 || n%100 > 13 {
		suffix = cmp.Or(map[int]string{1: "st", 2: "nd", 3: "rd"}[n%10], suffix)
	}
	return fmt.Sprint(n) + suffix
}
