package pictures

import (
	"bufio"
	"bytes"
	"fmt"
	"html"
	"image"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/browser"
	"github.com/lockstep-ml/lockstep/timeline/timelinetest"
)

// TestPictures makes the pictures of the documentation from a real training, in the folder of LOCKSTEP_PICTURES:
// docs/pictures/make starts it.
func TestPictures(t *testing.T) {
	folder := os.Getenv("LOCKSTEP_PICTURES")
	if folder == "" {
		t.Skip("LOCKSTEP_PICTURES names no folder: it makes the pictures of the documentation")
	}
	p := &pictures{t: t, folder: folder, work: t.TempDir()}
	p.lockstep = filepath.Join(p.work, "lockstep")
	build := exec.Command("go", "build", "-o", p.lockstep, "../../cmd/lockstep")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, f := range map[string]func(){
		"trace": p.traceAndReport, "plot": p.plot, "terminal": p.terminal, "page": p.page,
	} {
		t.Run(name, func(sub *testing.T) {
			defer func() { p.t = t }()
			p.t = sub
			f()
		})
	}
}

// pictures makes the pictures.
type pictures struct {
	t                      *testing.T
	folder, work, lockstep string
}

// write writes a picture of at most 150 KB.
func (p *pictures) write(name string, content []byte) {
	p.t.Helper()
	if len(content) == 0 || len(content) > 150_000 {
		p.t.Errorf("%s: %d bytes, want 1 to 150,000", name, len(content))
	}
	if err := os.WriteFile(filepath.Join(p.folder, name), content, 0o644); err != nil {
		p.t.Fatal(err)
	}
}

// run runs a program and returns its standard output.
func (p *pictures) run(program string, args ...string) string {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), program, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		p.t.Fatalf("%s %v: %v: %s%s", program, args, err, out, stderr.String())
	}
	return string(out)
}

// training is a training on three workers.
func (p *pictures) training(launcher, flags string) string {
	return fmt.Sprintf("%s run --nproc-per-node 3 --rdzv-id digits %s -- %s train --strategy multi-worker --replicas 1 "+
		"--validation-split 0.1 %s", p.lockstep, launcher, p.lockstep, flags)
}

// terminal makes the picture of lockstep run in a terminal.
func (p *pictures) terminal() {
	tmux := func(args ...string) string {
		return p.run("tmux", append([]string{"-L", "lockstep-pictures"}, args...)...)
	}
	tmux("new-session", "-d", "-x", "100", "-y", "24", p.training("", "--epochs 400"))
	defer tmux("kill-server")
	var screen string
	for begin := time.Now(); !strings.Contains(screen, "epoch 4/400: "); time.Sleep(200 * time.Millisecond) {
		if screen = tmux("capture-pane", "-p"); time.Since(begin) > 2*time.Minute {
			p.t.Fatalf("the terminal shows\n%s", screen)
		}
	}
	lines := strings.Split(strings.TrimRight(screen, "\n"), "\n")
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="monospace" font-size="14">`+
		"\n<title>lockstep run in a terminal</title>\n"+`<rect width="100%%" height="100%%" rx="8" fill="#1b1f24"/>`+"\n",
		100*84/10+24, len(lines)*18+24)
	for i, line := range lines {
		fmt.Fprintf(&b, `<text x="12" y="%d" fill="#dfe3e8" xml:space="preserve" textLength="%d">%s</text>`+"\n", 26+18*i,
			len([]rune(line))*84/10, html.EscapeString(line))
	}
	b.WriteString("</svg>\n")
	p.write("terminal.svg", []byte(b.String()))
}

// page makes the picture of the live page.
func (p *pictures) page() {
	args := strings.Fields(p.training("--dashboard 127.0.0.1:0", "--epochs 400"))
	cmd := exec.CommandContext(p.t.Context(), args[0], args[1:]...)
	stderr, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }() // it is interrupted
	defer func() { _ = cmd.Process.Signal(syscall.SIGINT) }()
	lines := bufio.NewScanner(stderr)
	url := ""
	for url == "" && lines.Scan() {
		_, url, _ = strings.Cut(lines.Text(), "dashboard at ")
	}
	go func() {
		for lines.Scan() { // so that it does not block
		}
	}()
	b := browser.Open(p.t)
	b.Visit(url, 1000, 860)
	b.Await(`document.querySelectorAll('#workers tbody tr').length === 3 && document.querySelectorAll('.chart canvas').length >= 4`)
	for begin := time.Now(); time.Since(begin) < 40*time.Second && b.Eval(`points.length > 500`) != true; {
		time.Sleep(time.Second)
	}
	p.write("page.png", b.Picture())
}

// traceAndReport makes the pictures of a trace and of a report.
func (p *pictures) traceAndReport() {
	trace, out := filepath.Join(p.work, "trace.json"), filepath.Join(p.work, "out")
	args := strings.Fields(p.training("", "--epochs 6 --trace-steps 4 --trace "+trace+" --out "+out))
	p.run(args[0], args[1:]...)
	f, err := os.Open(trace)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	read, err := timelinetest.Read(f)
	if err != nil {
		p.t.Fatal(err)
	}
	p.write("trace.svg", []byte(drawTrace(read, 4)))
	b := showTrace(p.t, trace, 1000, 640)
	b.Await(`document.body.innerText.includes('worker 2')`)
	b.Eval(showSteps)
	time.Sleep(time.Second) // the viewer draws later
	whole, err := png.Decode(bytes.NewReader(b.Picture()))
	if err != nil {
		p.t.Fatal(err)
	}
	var rows bytes.Buffer // without the viewer's empty table of selected events
	if err := png.Encode(&rows, whole.(*image.RGBA).SubImage(image.Rect(0, 0, 1000, 300))); err != nil {
		p.t.Fatal(err)
	}
	p.write("trace.png", rows.Bytes())
	b = browser.Open(p.t)
	b.Visit("file://"+filepath.Join(out, "report.html"), 1000, 780)
	b.Await(`document.readyState === 'complete' && document.querySelectorAll('svg').length > 0`)
	p.write("report.png", b.Picture())
}

// plot makes the picture of an all-reduce over sizes.
func (p *pictures) plot() {
	file := filepath.Join(p.work, "plot.svg")
	p.run(p.lockstep, "bench", "allreduce", "--ranks", "2", "--limit", "--plot", file)
	text, err := os.ReadFile(file)
	if err != nil {
		p.t.Fatal(err)
	}
	p.write("bench.svg", text)
}
