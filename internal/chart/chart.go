// Package chart draws line charts as SVG, with gonum/plot.
//
// A [Chart] has one x axis and lines. [Draw] puts charts below one another into one picture, which has no outside
// references and no script. With [Options.Themed] the colors are CSS variables ([Style] sets them), so that an HTML
// page can change them, for example for dark mode.
//
// Lines differ by color, dash and glyph, because not everybody sees the colors. The colors are those of Okabe and Ito,
// "Color Universal Design" (2008).
package chart

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"image/color"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Chart is a chart of lines over one x axis.
type Chart struct {
	Title, X, Y string // the title, and the labels of the axes
	Lines       []Line
	// LogX and LogY make an axis logarithmic. Points that are not above 0 are left out.
	LogX, LogY bool
	// FormatX and FormatY format the numbers at an axis; default as short as possible.
	FormatX, FormatY func(float64) string
	// StepX is the factor between the marks of a logarithmic x axis; default 10.
	StepX float64
	// FromZero makes a linear y axis begin at 0.
	FromZero bool
}

// Line is a line of a [Chart]. X and Y have the same length, X ascends. Points with a NaN or an infinity are left
// out.
type Line struct {
	Name string
	X, Y []float64
	// Limit draws the line dashed and without glyphs: a bound, not a measurement.
	Limit bool
}

// Options are the options of [Draw].
type Options struct {
	Width, Height float64 // of a chart, in points; default 560 by 300
	Themed        bool    // colors are CSS variables
}

// ink, paper and grid are the colors of text and axes, of the background, and of the lines at marks.
var (
	ink   = color.RGBA{0x1f, 0x23, 0x28, 0xff}
	paper = color.RGBA{0xff, 0xff, 0xff, 0xff}
	grid  = color.RGBA{0xdd, 0xe1, 0xe6, 0xff}
)

// palette holds the colors of the lines.
var palette = []color.RGBA{
	{0x00, 0x72, 0xb2, 0xff},
	{0xd5, 0x5e, 0x00, 0xff},
	{0x00, 0x9e, 0x73, 0xff},
	{0xcc, 0x79, 0xa7, 0xff},
	{0x56, 0xb4, 0xe9, 0xff},
	{0xe6, 0x9f, 0x00, 0xff},
}

// dark are the values of the CSS variables in dark mode: ink, paper, grid, lines.
var dark = []string{"#e6edf3", "#0d1117", "#30363d", "#58a6ff", "#ff9e64", "#3fd6a5", "#e5a1c7", "#79d0ff", "#f2c14e"}

// variables returns the CSS variables and the colors in SVG that they replace.
func variables() (names, values []string) {
	for i, c := range append([]color.RGBA{ink, paper, grid}, palette...) {
		name := []string{"--ink", "--paper", "--grid"}[min(i, 2)]
		if i > 2 {
			name = fmt.Sprintf("--line-%d", i-2)
		}
		names, values = append(names, name), append(values, fmt.Sprintf("#%02X%02X%02X", c.R, c.G, c.B))
	}
	return names, values
}

// Style returns the CSS that defines the variables of themed pictures: --ink, --paper, --grid, and --line-1 to
// --line-6, for light and dark mode and for print.
func Style() string {
	names, light := variables()
	block := func(values []string) string {
		var b strings.Builder
		for i, name := range names {
			fmt.Fprintf(&b, "%s:%s;", name, strings.ToLower(values[i]))
		}
		return b.String()
	}
	return fmt.Sprintf(":root{color-scheme:light dark;%s}\n@media screen and (prefers-color-scheme:dark){:root{%s}}\n",
		block(light), block(dark))
}

// Draw draws charts below one another. description is what a screen reader reads for the picture.
func Draw(description string, o Options, charts ...Chart) ([]byte, error) {
	if o.Width == 0 {
		o.Width, o.Height = 560, 300
	}
	if len(charts) == 0 {
		return nil, fmt.Errorf("chart: no chart to draw")
	}
	canvas := vgsvg.New(vg.Points(o.Width), vg.Points(o.Height*float64(len(charts))))
	plots := make([][]*plot.Plot, len(charts))
	for i := range charts {
		p, err := charts[i].plot()
		if err != nil {
			return nil, err
		}
		plots[i] = []*plot.Plot{p}
	}
	tiles := draw.Tiles{
		Rows: len(charts), Cols: 1, PadX: vg.Points(8), PadY: vg.Points(14), PadTop: vg.Points(8), PadBottom: vg.Points(8),
		PadLeft: vg.Points(8), PadRight: vg.Points(14),
	}
	whole := draw.New(canvas)
	whole.SetColor(paper)
	whole.Fill(whole.Rectangle.Path())
	for i, row := range plot.Align(plots, tiles, whole) {
		plots[i][0].Draw(row[0])
	}
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, err
	}
	return finish(b.Bytes(), description, o.Themed)
}

// finish makes the picture of the library accessible, and its colors variables.
func finish(svg []byte, description string, themed bool) ([]byte, error) {
	start := bytes.Index(svg, []byte("<svg"))
	end := bytes.IndexByte(svg[max(start, 0):], '>') + start
	if start < 0 || end <= start {
		return nil, fmt.Errorf("chart: gonum/plot wrote no SVG")
	}
	var title bytes.Buffer
	if err := xml.EscapeText(&title, []byte(description)); err != nil {
		return nil, err
	}
	head := bytes.ReplaceAll(svg[start:end], []byte("pt\""), []byte("\""))
	body := fmt.Sprintf("%s\n\trole=\"img\" aria-label=\"%s\">\n<title>%s</title>%s", head, title.String(), title.String(),
		svg[end+1:])
	const family = "font-family:Liberation Sans"
	body = strings.ReplaceAll(body, family, family+",Arial,Helvetica,sans-serif") // of the same widths
	names, values := variables()
	if themed {
		for i, name := range names {
			body = strings.ReplaceAll(body, values[i], fmt.Sprintf("var(%s)", name))
		}
		body = strings.Replace(body, "\txmlns=\"http://www.w3.org/2000/svg\"\n", "", 1) // not needed in HTML
		body = strings.Replace(body, "\txmlns:xlink=\"http://www.w3.org/1999/xlink\"\n", "", 1)
	}
	return []byte(body), nil
}

// plot returns the chart as a plot of the library.
func (c *Chart) plot() (*plot.Plot, error) {
	p := plot.New()
	p.BackgroundColor = nil // Draw paints one for all charts
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.Title, c.X, c.Y
	p.Title.Padding = vg.Points(6)
	for _, s := range []struct {
		style *text.Style
		size  vg.Length
	}{
		{&p.Title.TextStyle, 13},
		{&p.X.Label.TextStyle, 11},
		{&p.Y.Label.TextStyle, 11},
		{&p.X.Tick.Label, 10},
		{&p.Y.Tick.Label, 10},
		{&p.Legend.TextStyle, 10},
	} {
		s.style.Color = ink
		s.style.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: s.size}
	}
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Color, axis.Tick.Color = ink, ink
		axis.Padding = 0
	}
	p.X.Tick.Marker = ticker(c.FormatX, c.LogX, c.StepX)
	p.Y.Tick.Marker = ticker(c.FormatY, c.LogY, 0)
	lines := plotter.NewGrid()
	lines.Vertical.Color, lines.Horizontal.Color = grid, grid
	p.Add(lines)
	points, drawn := 0, 0
	for i, l := range c.Lines {
		if len(l.X) != len(l.Y) {
			return nil, fmt.Errorf("chart: line %q has %d x and %d y", l.Name, len(l.X), len(l.Y))
		}
		xy := c.points(l)
		if len(xy) == 0 {
			continue
		}
		points, drawn = points+len(xy), drawn+1
		if err := add(p, l, xy, i); err != nil {
			return nil, fmt.Errorf("chart: line %q: %w", l.Name, err)
		}
	}
	if points == 0 {
		return nil, fmt.Errorf("chart: %q has no points", c.Title)
	}
	if drawn < 2 && len(c.Lines) < 2 {
		p.Legend = plot.NewLegend() // the title says what it is
	}
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.XOffs, p.Legend.YOffs = vg.Points(8), -vg.Points(4)
	p.Legend.ThumbnailWidth, p.Legend.Padding = vg.Points(26), vg.Points(1)
	c.ranges(p)
	return p, nil
}

// add adds a line, in the i-th color, dash and glyph.
func add(p *plot.Plot, l Line, xy plotter.XYs, i int) error {
	line, err := plotter.NewLine(xy)
	if err != nil {
		return err
	}
	line.Color, line.Width = palette[i%len(palette)], vg.Points(1.6)
	if l.Limit {
		line.Dashes = []vg.Length{vg.Points(6), vg.Points(4)}
		p.Add(line)
		p.Legend.Add(l.Name, line)
		return nil
	}
	const fewPoints = 40 // with more, glyphs would hide the line
	if len(xy) > fewPoints {
		if i%3 > 0 {
			line.Dashes = []vg.Length{vg.Points(float64(2 + 3*(i%3))), vg.Points(2)}
		}
		p.Add(line)
		p.Legend.Add(l.Name, line)
		return nil
	}
	dots, err := plotter.NewScatter(xy)
	if err != nil {
		return err
	}
	glyphs := []draw.GlyphDrawer{draw.CircleGlyph{}, draw.BoxGlyph{}, draw.TriangleGlyph{}, draw.PyramidGlyph{}}
	dots.GlyphStyle = draw.GlyphStyle{Color: line.Color, Radius: vg.Points(2.6), Shape: glyphs[i%len(glyphs)]}
	p.Add(line, dots)
	p.Legend.Add(l.Name, line, dots)
	return nil
}

// extreme bounds the numbers that are drawn, so that ranges and marks are finite.
const extreme = 1e100

// points returns the points of a line that can be drawn.
func (c *Chart) points(l Line) (xy plotter.XYs) {
	for i, x := range l.X {
		y := l.Y[i]
		switch {
		case !(math.Abs(x) <= extreme && math.Abs(y) <= extreme):
		case c.LogX && x < 1/extreme || c.LogY && y < 1/extreme:
		default:
			xy = append(xy, plotter.XY{X: x, Y: y})
		}
	}
	return xy
}

// ranges sets the ranges and scales of the axes. A range without extent is widened. The space at the top is for the
// legend.
func (c *Chart) ranges(p *plot.Plot) {
	p.X.Min, p.X.Max = widen(p.X.Min, p.X.Max, c.LogX, 0)
	names := 0
	if len(c.Lines) > 1 {
		names = len(c.Lines)
	}
	if c.FromZero && !c.LogY {
		p.Y.Min = min(0, p.Y.Min)
	}
	p.Y.Min, p.Y.Max = widen(p.Y.Min, p.Y.Max, c.LogY, 0.05+0.06*float64(names))
	if c.LogX {
		p.X.Scale = plot.LogScale{}
	}
	if c.LogY {
		p.Y.Scale = plot.LogScale{}
	}
}

// widen returns a range with this share more at its end.
func widen(low, high float64, log bool, share float64) (float64, float64) {
	if log {
		if low == high {
			low, high = low/2, high*2
		}
		return low, high * math.Pow(high/low, share)
	}
	if low == high {
		low, high = low-math.Max(math.Abs(low)/10, 1e-9), high+math.Max(math.Abs(high)/10, 1e-9)
	}
	return low, high + share*(high-low)
}

// marksMost is the largest number of marks of a logarithmic axis.
const marksMost = 12

// ticker returns the marks of an axis.
func ticker(format func(float64) string, log bool, step float64) plot.Ticker {
	if format == nil {
		format = func(x float64) string { return strings.TrimSuffix(fmt.Sprintf("%.4g", x), ".0") }
	}
	if step == 0 {
		step = 10
	}
	return plot.TickerFunc(func(low, high float64) (ticks []plot.Tick) {
		if !log {
			ticks = plot.DefaultTicks{}.Ticks(low, high)
			for i := range ticks {
				if ticks[i].Label != "" {
					ticks[i].Label = format(ticks[i].Value)
				}
			}
			return slices.DeleteFunc(ticks, func(t plot.Tick) bool { return t.Label == "" })
		}
		from, to := math.Ceil(math.Log(low)/math.Log(step)-1e-9), math.Floor(math.Log(high)/math.Log(step)+1e-9)
		every := math.Ceil((to - from + 1) / marksMost)
		for e := from; e <= to; e += every {
			x := math.Pow(step, e)
			ticks = append(ticks, plot.Tick{Value: x, Label: format(x)})
		}
		if len(ticks) < 2 {
			ticks = []plot.Tick{{Value: low, Label: format(low)}, {Value: high, Label: format(high)}}
		}
		return ticks
	})
}
