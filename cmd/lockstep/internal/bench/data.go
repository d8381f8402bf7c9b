package bench

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/tensor"
)

// benchDataFlags are the flags of lockstep bench data.
type benchDataFlags struct {
	images, side, batch int
	workers, rounds     int
	dir, python         string
	format              string
	worker, of          int // of a process of the measurement
}

// benchDataWorker is the hidden flag that starts a process of the measurement.
const benchDataWorker = "worker"

//go:embed data.py
var benchDataScript string

func newBenchData() *cobra.Command {
	var o benchDataFlags
	cmd := &cobra.Command{
		Use:   "data",
		Short: "Measure how fast workers read and decode images",
		Long: `Data makes a folder of PNG images and measures how many of them a second are
read, decoded to float32 and joined to batches in a random order: by one worker,
and by several. Each worker reads its share of every batch, and one row more, by
which workers compare their data. Each worker is one process, pinned to one core
on Linux. The measurements alternate, in rounds; the numbers are medians.

With --pytorch it also measures PyTorch's DataLoader on the same images, with as
many workers, in the same rounds: the argument is a Python that has torch, numpy
and pillow.`,
		Example: `  lockstep bench data
  lockstep bench data --images 20000 --workers 2 --pytorch python3`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed(benchDataWorker) {
				return o.read(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
			}
			return o.measure(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.IntVar(&o.images, "images", 20_000, "number of images")
	f.IntVar(&o.side, "side", 64, "height and width of an image, in pixels")
	f.IntVar(&o.batch, "batch", 128, "images of a batch, over all workers")
	f.IntVar(&o.workers, "workers", 2, "number of workers that are compared with one")
	f.IntVar(&o.rounds, "rounds", 5, "rounds to measure, after one to warm up")
	f.StringVar(&o.dir, "dir", "", "`folder` for the images, which is kept (default a temporary one)")
	f.StringVar(&o.python, "pytorch", "", "also measure PyTorch's DataLoader with this `program`")
	cli.ChoiceVar(f, &o.format, "format", "plain", "", "plain", "json")
	f.IntVar(&o.worker, benchDataWorker, 0, "")
	f.IntVar(&o.of, "of", 1, "")
	for _, name := range []string{benchDataWorker, "of"} {
		if err := f.MarkHidden(name); err != nil {
			panic(err)
		}
	}
	cli.Limit(f, "[1,10000000]", "images")
	cli.Limit(f, "[1,4096]", "side")
	cli.Limit(f, fmt.Sprintf("[1,%d]", 1<<20), "batch")
	cli.Limit(f, "[1,1024]", "workers")
	cli.Limit(f, "[1,1000]", "rounds")
	return cmd
}

// measure starts the processes and prints the results.
func (o *benchDataFlags) measure(ctx context.Context, out, progress io.Writer) (err error) {
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "lockstep-bench-data-"); err != nil {
			return err
		}
		defer os.RemoveAll(o.dir)
	}
	if err := o.makeImages(ctx, progress); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var groups []*benchGroup
	defer func() {
		for _, g := range groups {
			g.stop()
		}
	}()
	start := func(program, name string, workers int, commands ...*exec.Cmd) error {
		g := &benchGroup{name: name, program: program, workers: workers}
		groups = append(groups, g)
		for _, c := range commands {
			if err := g.start(c, program == "lockstep"); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		return nil
	}
	for _, n := range slices.Compact([]int{1, o.workers}) {
		var commands []*exec.Cmd
		for w := range n {
			c := exec.CommandContext(ctx, self, "bench", "data", fmt.Sprintf("--%s=%d", benchDataWorker, w),
				fmt.Sprintf("--of=%d", n), "--dir="+o.dir, fmt.Sprintf("--images=%d", o.images),
				fmt.Sprintf("--batch=%d", o.batch), fmt.Sprintf("--side=%d", o.side))
			c.Env = append(os.Environ(), "GOMAXPROCS=1")
			commands = append(commands, c)
		}
		if err := start("lockstep", cli.Count(n, "worker"), n, commands...); err != nil {
			return err
		}
	}
	if o.python != "" {
		if err := start("pytorch", fmt.Sprintf("PyTorch, %d workers", o.workers), o.workers, exec.CommandContext(ctx,
			o.python, "-c", benchDataScript, o.dir, fmt.Sprint(o.batch), fmt.Sprint(o.workers))); err != nil {
			return err
		}
	}
	for round := range o.rounds + 1 {
		for _, g := range groups {
			elapsed, err := g.pass(o.images)
			if err != nil {
				return fmt.Errorf("%s: %w", g.name, err)
			}
			if round > 0 {
				g.speeds = append(g.speeds, float64(o.images)/elapsed)
			}
		}
	}
	for _, g := range groups {
		slices.Sort(g.speeds)
		median := g.speeds[len(g.speeds)/2]
		if o.format == "json" {
			if err := cli.WriteJSON(out, g.json(groups[0], o)); err != nil {
				return err
			}
			continue
		}
		if _, err := fmt.Fprintf(out, "%-20s %8.0f images/s  %.2f x (%.0f to %.0f)\n", g.name, median,
			median/groups[0].speeds[len(g.speeds)/2], g.speeds[0], g.speeds[len(g.speeds)-1]); err != nil {
			return err
		}
	}
	return nil
}

// benchData is the measurement of a group as JSON.
type benchData struct {
	Program   string       `json:"program"` // lockstep or pytorch
	Workers   int          `json:"workers"`
	Images    int          `json:"images"`
	Side      int          `json:"side_pixels"`
	Batch     int          `json:"global_batch"`
	PerSecond cli.Number   `json:"images_per_second"` // the median of the rounds
	Rounds    []cli.Number `json:"rounds"`            // images per second of each, the slowest first
	Speedup   cli.Number   `json:"speedup"`           // over one worker
}

// json returns the measurement, whose speeds are sorted.
func (g *benchGroup) json(one *benchGroup, o *benchDataFlags) benchData {
	middle := len(g.speeds) / 2
	d := benchData{
		Program: g.program, Workers: g.workers, Images: o.images, Side: o.side, Batch: o.batch,
		PerSecond: cli.Number(g.speeds[middle]), Speedup: cli.Number(g.speeds[middle] / one.speeds[middle]),
	}
	for _, x := range g.speeds {
		d.Rounds = append(d.Rounds, cli.Number(x))
	}
	return d
}

// benchGroup are processes that read the images together.
type benchGroup struct {
	name      string
	program   string
	workers   int
	processes []*benchProcess
	speeds    []float64 // by round
}

type benchProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	err bytes.Buffer
}

// start starts a process and waits until it is ready. A pinned process has a processor for itself, if there are enough.
func (g *benchGroup) start(cmd *exec.Cmd, pinned bool) error {
	p := &benchProcess{cmd: cmd}
	cmd.Stderr = &p.err
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if pinned {
		affinity.Run(affinity.Read().Of(affinity.Core, g.workers, len(g.processes)), func() { err = cmd.Start() })
	} else {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	p.in, p.out = in, bufio.NewScanner(out)
	g.processes = append(g.processes, p)
	if !p.out.Scan() {
		return p.failed()
	}
	return nil
}

func (p *benchProcess) failed() error {
	p.in.Close()
	return fmt.Errorf("a process ended: %w\n%s", errors.Join(p.cmd.Wait(), p.out.Err()), p.err.Bytes())
}

// pass lets all processes read the images once, at the same time. It returns the time of the slowest, in seconds.
func (g *benchGroup) pass(images int) (slowest float64, err error) {
	for _, p := range g.processes {
		if _, err := fmt.Fprintln(p.in, "pass"); err != nil {
			return 0, p.failed()
		}
	}
	total := 0
	for _, p := range g.processes {
		if !p.out.Scan() {
			return 0, p.failed()
		}
		var rows int
		var elapsed float64
		if _, err := fmt.Sscan(p.out.Text(), &rows, &elapsed); err != nil {
			return 0, fmt.Errorf("a process printed %q: %w", p.out.Text(), err)
		}
		total, slowest = total+rows, max(slowest, elapsed)
	}
	if total != images {
		return 0, fmt.Errorf("%d of %d images were read", total, images)
	}
	return slowest, nil
}

// stop ends the processes.
func (g *benchGroup) stop() {
	for _, p := range g.processes {
		p.in.Close()
		_ = p.cmd.Wait() // already reported, or of no interest
	}
}

// read is one worker: it makes a pass for each line of in.
func (o *benchDataFlags) read(ctx context.Context, in io.Reader, out io.Writer) error {
	ds := data.FromFunc(o.images, func(_ context.Context, i int) (data.Element, error) {
		return o.image(i)
	}).Shuffle(1).Batch(o.batch).Prefetch(2)
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	machine.TuneGC(nil) // as for a training, which would otherwise collect garbage for every 40 images
	lines := bufio.NewScanner(in)
	for epoch := 0; lines.Scan(); epoch++ {
		start := time.Now()
		rows, err := o.pass(data.WithEpoch(ctx, epoch), ds)
		if err == nil {
			_, err = fmt.Fprintln(out, rows, time.Since(start).Seconds())
		}
		if err != nil {
			return err
		}
	}
	return lines.Err()
}

// pass reads this worker's rows of all batches, as training does, and returns their number.
func (o *benchDataFlags) pass(ctx context.Context, ds data.Dataset) (int, error) {
	r, err := data.Open(ctx, ds)
	if err != nil {
		return 0, err
	}
	reader, total := r.(data.RowReader), 0
	per := (o.batch + o.of - 1) / o.of
	for batch := range reader.Len() {
		size := reader.Rows(batch)
		var rows []int
		for row := min(o.worker*per, size); row < min((o.worker+1)*per, size); row++ {
			rows = append(rows, row)
		}
		total += len(rows)
		if o.of > 1 && batch%o.of == o.worker { // the row of another worker that this one compares
			rows = append(rows, (o.worker+1)*per%size)
		}
		if len(rows) == 0 {
			continue
		}
		if _, _, err := reader.ReadRows(ctx, batch, rows); err != nil {
			return 0, err
		}
	}
	return total, nil
}

func (o *benchDataFlags) file(i int) string { return filepath.Join(o.dir, fmt.Sprintf("%08d.png", i)) }

// image reads and decodes image i.
func (o *benchDataFlags) image(i int) (data.Element, error) {
	text, err := os.ReadFile(o.file(i))
	if err != nil {
		return nil, err
	}
	pixels, err := data.DecodeImage(text, data.ImageOptions{Channels: 3})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.file(i), err)
	}
	return data.Batch{
		Inputs: []*tensor.Tensor{pixels}, Labels: []*tensor.Tensor{tensor.Scalar(int32(i % 10))},
	}, nil
}

// makeImages writes the images that are missing: a gradient with noise, which compresses about as photographs do.
func (o *benchDataFlags) makeImages(ctx context.Context, progress io.Writer) error {
	if err := os.MkdirAll(o.dir, 0o777); err != nil {
		return err
	}
	fmt.Fprintf(progress, "%d images of %d by %d pixels in %s\n", o.images, o.side, o.side, o.dir)
	var encoder png.Encoder
	for i := range o.images {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if _, err := os.Stat(o.file(i)); err == nil {
			continue
		}
		r := rand.New(rand.NewPCG(uint64(i), 1))
		img := image.NewRGBA(image.Rect(0, 0, o.side, o.side))
		dx, dy := r.IntN(5), r.IntN(5)
		for y := range o.side {
			for x := range o.side {
				v := x*dx + y*dy
				img.SetRGBA(x, y, color.RGBA{
					uint8(v + r.IntN(24)), uint8(v/2 + r.IntN(24)), uint8(255 - v + r.IntN(24)), 255,
				})
			}
		}
		var b bytes.Buffer
		if err := encoder.Encode(&b, img); err != nil {
			return err
		}
		if err := os.WriteFile(o.file(i), b.Bytes(), 0o666); err != nil {
			return err
		}
	}
	runtime.GC()
	return nil
}
