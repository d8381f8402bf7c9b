package main

import (
	"embed"
	"html/template"
	"io"

	"github.com/lockstep-ml/lockstep/internal/chart"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

//go:embed pages
var pageFiles embed.FS

// pageTable is a table of a page, behind a chart.
type pageTable struct {
	Caption string
	Head    []string
	Rows    [][]string
}

// pagePairs is a table of names and texts.
type pagePairs struct {
	Caption string
	Rows    [][2]string
}

// pageChart is a chart of a page, with its numbers as a table.
type pageChart struct {
	SVG   template.HTML
	Table pageTable
}

// newPageChart draws charts and lists their points.
func newPageChart(description string, width, height float64, c chart.Chart) (pageChart, error) {
	svg, err := chart.Draw(description, chart.Options{Width: width, Height: height, Themed: true}, c)
	if err != nil {
		return pageChart{}, err
	}
	return pageChart{template.HTML(svg), tableOf(c)}, nil // by package chart, which escapes the texts
}

// writePage executes a template of pages within the layout, and writes one HTML file without outside references.
func writePage(file, name string, content any) error {
	t, err := template.New("").ParseFS(pageFiles, "pages/layout.html", "pages/"+name)
	if err != nil {
		return err
	}
	return checkpoint.WriteFile(file, func(w io.Writer) error { return t.ExecuteTemplate(w, "layout", content) })
}

// pageStyle is the part of the style that charts share.
func pageStyle() template.CSS { return template.CSS(chart.Style()) }
