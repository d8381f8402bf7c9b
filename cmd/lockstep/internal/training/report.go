package training

import (
	"context"
	"fmt"
	"html/template"
	"maps"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/page"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/internal/chart"
	"github.com/lockstep-ml/lockstep/internal/units"
	"github.com/lockstep-ml/lockstep/train"
)

// reportFile is the page that --out gets.
const reportFile = "report.html"

// curve is a number over the steps, in at most curvePoints means of consecutive steps.
type curve struct {
	every int // steps of a point
	sum   float64
	n     int // steps in sum
	step  int
	x, y  []float64
}

const curvePoints = 512

// add adds the value of a step. Values that are not finite are left out.
func (c *curve) add(step int, value float64) {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return
	}
	c.every = max(c.every, 1)
	c.sum, c.n, c.step = c.sum+value, c.n+1, step
	if c.n == c.every {
		c.flush()
	}
	if len(c.x) < curvePoints {
		return
	}
	for i := range curvePoints / 2 {
		c.x[i], c.y[i] = c.x[2*i+1], (c.y[2*i]+c.y[2*i+1])/2
	}
	c.x, c.y, c.every = c.x[:curvePoints/2], c.y[:curvePoints/2], 2*c.every
}

// flush adds the mean of the steps that are left.
func (c *curve) flush() {
	if c.n > 0 {
		c.x, c.y = append(c.x, float64(c.step)), append(c.y, c.sum/float64(c.n))
		c.sum, c.n = 0, 0
	}
}

func (c *curve) line(name string) chart.Line {
	c.flush()
	return chart.Line{Name: name, X: c.x, Y: c.y}
}

// runRecord is what a run keeps for its report.
type runRecord struct {
	loss, rate curve
	step       int // of all epochs of this run, which may have resumed an earlier one
	times      setup.StepClock
}

// callback records the steps. The first one is not counted among the parts of a step: it fills caches.
func (r *runRecord) callback(rate func() (float64, bool)) train.Callback {
	return train.Callback{
		OnStepEnd: func(_ context.Context, s train.Step) error {
			if r.step++; r.step == 1 {
				r.times.Reset()
			} else {
				r.times.Add()
			}
			if !s.Skipped {
				r.loss.add(r.step, s.Loss)
			}
			if x, ok := rate(); ok {
				r.rate.add(r.step, x)
			}
			return nil
		},
	}
}

// reportPage is the content of pages/train.html.
type reportPage struct {
	Style                 template.CSS
	Title, Lead           string
	Tiles                 [][2]string
	Charts                []page.Chart
	Step                  *reportStep
	Reduce                reportReduce
	Machine, Given, Flags page.Pairs
	Data                  reportData // as JSON, for programs
}

type reportStep struct {
	Text   string
	Parts  []reportPart
	Hidden string
}

type reportPart struct{ Class, Name, Time, Percent, About string }

type reportReduce struct {
	page.Pairs
	Text string
}

// reportData has the numbers of a report.
type reportData struct {
	Summary summary                 `json:"summary"`
	History map[string][]cli.Number `json:"history"`
	Loss    [][2]float64            `json:"loss"` // step, mean since the point before
	Rate    [][2]float64            `json:"learning_rate"`
	Step    *setup.StepTimes        `json:"step"`       // null: not measured
	Reduce  *reportBound            `json:"all_reduce"` // null: one replica
	Flags   map[string]string       `json:"flags"`
}

type reportBound struct {
	Bytes int           `json:"bytes"`
	Time  time.Duration `json:"time_ns"`  // 0: not measured
	BusBW float64       `json:"busbw"`    // GB/s
	Limit time.Duration `json:"limit_ns"` // 0: not known
}

// communicationCalls is how often the communication of a step is measured for the report.
const communicationCalls = 5

// writeReport writes the page. Every worker calls it, because they measure the communication together; the chief
// writes. A failure of the measurement leaves it out.
func (r *trainRun) writeReport(ctx context.Context) error {
	var alone time.Duration
	if r.communicates(ctx) {
		var err error
		if alone, err = r.Trainer.CommunicationTime(ctx, communicationCalls); err != nil {
			alone = 0
		}
	}
	if !r.chief || r.flags.out == "" {
		return nil
	}
	content, err := r.page(r.data(alone))
	if err == nil {
		err = page.Write(filepath.Join(r.flags.out, reportFile), "train.html", content)
	}
	if err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	r.written = append(r.written, [2]string{"report", filepath.Join(r.flags.out, reportFile)})
	return nil
}

// communicates reports whether the communication of a step is measured: the chief writes a report, and all workers
// trained to the end, and step by step together. Only the chief's --out counts, so the workers exchange it.
func (r *trainRun) communicates(ctx context.Context) bool {
	if r.history.Steps == 0 || r.stopped || r.Strategy.NumReplicasInSync() == 1 || r.flags.diloco.config() != nil {
		return false
	}
	folder := ""
	if r.chief {
		folder = r.flags.out
	}
	if r.Worker == nil {
		return folder != ""
	}
	folders, err := r.Worker.Exchange(ctx, "report", []byte(folder))
	return err == nil && slices.ContainsFunc(folders, func(f []byte) bool { return len(f) > 0 })
}

// data collects the numbers of the report. alone is the time of a step's communication with nothing else running.
func (r *trainRun) data(alone time.Duration) reportData {
	d := reportData{
		Summary: r.summarise(), History: historyTable(r.history), Flags: map[string]string{},
	}
	resumed := r.history.Steps - r.record.step
	d.Loss, d.Rate = pointsOf(r.record.loss.line(""), resumed), pointsOf(r.record.rate.line(""), resumed)
	if r.record.times.Steps > 0 {
		t := r.record.times.PerStep()
		t.Communication = alone
		d.Step = &t
	}
	if n := r.Strategy.NumReplicasInSync(); n > 1 {
		b := &reportBound{Bytes: setup.ParameterBytes(r.Session), Time: alone}
		if alone > 0 {
			b.BusBW = 2 * float64(n-1) / float64(n) * float64(b.Bytes) / float64(alone)
		}
		if r.oneHost() && r.flags.Step.Compress.String() == "none" { // a sharded optimizer moves as many bytes
			b.Limit = memoryLimitOf(n, b.Bytes)
		}
		d.Reduce = b
	}
	r.flags.config.flags.VisitAll(func(f *pflag.Flag) { d.Flags[f.Name] = f.Value.String() })
	return d
}

// oneHost reports whether all workers are on this host, so that its memory bounds an all-reduce.
func (r *trainRun) oneHost() bool {
	if r.Worker == nil {
		return true
	}
	members := r.Worker.Members()
	return !slices.ContainsFunc(members, func(m worker.Member) bool { return m.Host != members[0].Host })
}

// memoryLimitOf returns the time of plain copies of so many bytes by each rank. Large ones are extrapolated from a
// part, which does not fit into the caches either.
func memoryLimitOf(ranks, bytes int) time.Duration {
	const most = 64 << 20
	part := min(bytes, most)
	return time.Duration(float64(bench.MemoryLimit(collective.AllReduce, ranks, part)) * float64(bytes) / float64(part))
}

// pointsOf returns the points of a line, after so many earlier steps.
func pointsOf(l chart.Line, earlier int) (points [][2]float64) {
	for i := range l.X {
		points = append(points, [2]float64{l.X[i] + float64(earlier), l.Y[i]})
	}
	return points
}

// lineOf returns the line through points.
func lineOf(name string, points [][2]float64) chart.Line {
	l := chart.Line{Name: name}
	for _, p := range points {
		l.X, l.Y = append(l.X, p[0]), append(l.Y, p[1])
	}
	return l
}

// page returns the content of the page.
func (r *trainRun) page(d reportData) (p reportPage, err error) {
	s := d.Summary
	p = reportPage{
		Style: page.Style(), Data: d,
		Title: fmt.Sprintf("Training of %s on %s", s.Model, s.Data),
		Lead: fmt.Sprintf("%s on %s of %s, %s in %s.", upperFirst(cli.Count(s.Steps, "step")), cli.Count(s.Replicas,
			"replica"), cli.Count(s.Workers, "worker"), cli.Grouped(s.Steps*s.GlobalBatch)+" "+s.Unit,
			time.Duration(float64(s.Seconds)*float64(time.Second)).Round(10*time.Millisecond)),
		Given: page.Pairs{Caption: "Flags that were given", Rows: nil}, Flags: page.Pairs{Caption: "All flags", Rows: nil},
	}
	tile := func(name string, x cli.Number, format string, scale float64) {
		if v := float64(x) * scale; !math.IsNaN(v) {
			p.Tiles = append(p.Tiles, [2]string{name, fmt.Sprintf(format, v)})
		}
	}
	tile("test accuracy", s.TestAccuracy, "%.2f %%", 100)
	tile("test loss", s.TestLoss, "%.4g", 1)
	tile("training loss", s.TrainLoss, "%.4g", 1)
	if s.PerSecond > 0 {
		p.Tiles = append(p.Tiles, [2]string{s.Unit + " per second", cli.Grouped(int(math.Round(float64(s.PerSecond))))})
		tile("all-reduce, of a step", s.ReduceShare, "%.1f %%", 100)
		tile("wait, of a step", s.WaitShare, "%.1f %%", 100)
	}
	if s.Interrupted {
		p.Lead += " The run was interrupted."
	}
	if p.Charts, err = r.curves(d); err != nil {
		return p, err
	}
	p.Step, p.Reduce, p.Machine = stepOf(d), reduceOf(d), r.machineTable(s)
	for _, name := range slices.Sorted(maps.Keys(d.Flags)) {
		row := [2]string{"--" + name, d.Flags[name]}
		p.Flags.Rows = append(p.Flags.Rows, row)
		if f := r.flags.config.flags.Lookup(name); f != nil && f.Changed {
			p.Given.Rows = append(p.Given.Rows, row)
		}
	}
	if len(p.Given.Rows) == 0 {
		p.Given.Rows = [][2]string{{"none", "the defaults below"}}
	}
	return p, nil
}

func upperFirst(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// curves draws loss, metrics, learning rate and speed.
func (r *trainRun) curves(d reportData) (charts []page.Chart, err error) {
	add := func(title, y string, zero bool, format func(float64) string, lines ...chart.Line) {
		c := chart.Chart{Title: title, X: "step", Y: y, FromZero: zero, FormatY: format}
		for _, l := range lines {
			if len(l.X) > 0 {
				c.Lines = append(c.Lines, l)
			}
		}
		if len(c.Lines) == 0 || err != nil {
			return
		}
		var one page.Chart
		if one, err = page.NewChart(title+" over the steps", 440, 260, c); err == nil {
			charts = append(charts, one)
		}
	}
	add("Loss", "loss", false, nil, lineOf("training", d.Loss), r.byEpoch("validation", "val_loss", d))
	for _, name := range slices.Sorted(maps.Keys(d.History)) {
		known := []string{"epoch", "seconds", "loss"}
		if slices.Contains(known, name) || strings.HasPrefix(name, "val_") {
			continue
		}
		add(upperFirst(name), name, false, nil, r.byEpoch("training", name, d), r.byEpoch("validation", "val_"+name, d))
	}
	add("Learning rate", "learning rate", true, nil, lineOf("learning rate", d.Rate))
	speed := chart.Line{Name: "training"}
	for i, end := range r.epochEnds() {
		if e := &r.history.Epochs[i]; e.Duration > 0 {
			speed.X = append(speed.X, end)
			speed.Y = append(speed.Y, float64(e.Examples)/e.Duration.Seconds())
		}
	}
	add("Speed", d.Summary.Unit+" per second", true, func(x float64) string { return cli.Grouped(int(math.Round(x))) },
		speed)
	return charts, err
}

// byEpoch returns a number of the history over the last steps of the epochs.
func (r *trainRun) byEpoch(line, name string, d reportData) chart.Line {
	l := chart.Line{Name: line}
	ends := r.epochEnds()
	for i, x := range d.History[name] {
		l.X, l.Y = append(l.X, ends[i]), append(l.Y, float64(x))
	}
	return l
}

// epochEnds returns the last step of each epoch.
func (r *trainRun) epochEnds() (ends []float64) {
	steps := 0
	for i := range r.history.Epochs {
		steps += r.history.Epochs[i].Steps
		ends = append(ends, float64(steps))
	}
	return ends
}

// stepOf describes the parts of a step; nil: they were not measured.
func stepOf(d reportData) *reportStep {
	if d.Step == nil {
		return nil
	}
	t := d.Step
	total := t.Total()
	if total <= 0 {
		return nil
	}
	of := ""
	if d.Summary.Workers > 1 {
		of = " of worker 0"
	}
	s := &reportStep{Text: fmt.Sprintf("A mean step takes %v on the first replica%s.", cli.Round(total), of)}
	for _, part := range []struct {
		class, name string
		time        time.Duration
		about       string
	}{
		{"c1", "input", t.Input, "waits for the batch"},
		{"c3", "computation", t.Compute, "forward and backward pass, with the communication that is hidden behind it"},
		{"c2 hatch", "exposed communication", t.Exposed, "waits for all-reduces, which includes waiting for slower replicas"},
		{"c6", "update", t.Update, "the optimizer computes new values"},
	} {
		s.Parts = append(s.Parts, reportPart{
			part.class, part.name, cli.Round(part.time).String(), fmt.Sprintf("%.1f", 100*float64(part.time)/float64(total)),
			part.about,
		})
	}
	switch alone := t.Communication; {
	case alone == 0:
	case alone > t.Exposed:
		s.Hidden = fmt.Sprintf("Alone, the same collective calls take %v: %v of it is hidden behind the computation.",
			cli.Round(alone), cli.Round(alone-t.Exposed))
	default:
		s.Hidden = fmt.Sprintf("Alone, the same collective calls take %v. The rest of the exposed time is waiting for "+
			"slower replicas.", cli.Round(alone))
	}
	return s
}

// reduceOf compares the all-reduce of the gradients with plain copies of them.
func reduceOf(d reportData) (out reportReduce) {
	b := d.Reduce
	if b == nil {
		out.Text = "One replica: nothing is reduced."
		return out
	}
	n := d.Summary.Replicas
	if b.Time == 0 {
		out.Text = fmt.Sprintf("The time of the all-reduce of %s between %s was not measured.", units.Bytes(b.Bytes),
			cli.Count(n, "replica"))
		return out
	}
	out.Text = fmt.Sprintf("The communication of a step with nothing else running: %s of gradients, %s.",
		units.Bytes(b.Bytes), cli.Count(n, "replica"))
	out.Caption = "All-reduce against plain copies"
	out.Rows = [][2]string{{"time", cli.Round(b.Time).String()}, {"bus bandwidth", fmt.Sprintf("%.3g GB/s", b.BusBW)}}
	if b.Limit == 0 {
		out.Rows = append(out.Rows, [2]string{
			"plain copies", "not known for these links and settings; lockstep doctor measures the links",
		})
		return out
	}
	out.Rows = append(out.Rows, [2]string{
		"plain copies", fmt.Sprintf("%v (the all-reduce takes %.2g times as long): each replica copies the gradients once, "+
			"to other memory. It is an estimate of the least time, not a bound: the all-reduce works in place, so more of it "+
			"fits into the caches", cli.Round(b.Limit), float64(b.Time)/float64(b.Limit)),
	})
	return out
}

// machineTable describes hardware and program.
func (r *trainRun) machineTable(s summary) page.Pairs {
	rows := [][2]string{
		{"machine", fmt.Sprintf("%s, %s/%s, %s", cli.Count(runtime.GOMAXPROCS(0), "core"), runtime.GOOS, runtime.GOARCH,
			machine.Vectors())},
	}
	if n := machine.Memory(); n > 0 {
		rows = append(rows, [2]string{"memory", units.Bytes(int(n))})
	}
	if n := machine.PeakMemory(); n > 0 {
		rows = append(rows, [2]string{"peak memory of this process", units.Bytes(n)})
	}
	return page.Pairs{Caption: "", Rows: append(rows, [][2]string{
		{"engine", r.Engine.Description()},
		{"kernels", s.Kernels},
		{"strategy", r.Strategy.String()},
		{"program", cli.VersionLine()},
		{"weights hash", s.WeightsHash},
		{"written", time.Now().UTC().Format(time.RFC3339)},
	}...)}
}
