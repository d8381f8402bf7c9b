package dashboard

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/browser"
)

// TestPage uses the page in a browser: what it shows, what a click does, on a phone, and which requests it makes. With
// LOCKSTEP_AXE, the path of axe.min.js (npm's axe-core), it also checks that axe finds no serious fault.
func TestPage(t *testing.T) {
	b := browser.Open(t)
	s, source := open(t, "127.0.0.1:0", "")
	b.Visit(s.URL(), 1280, 1500)
	b.Await(`document.querySelectorAll('#workers tbody tr').length === 4 && document.querySelectorAll('.chart canvas').length >= 4`)
	text := fmt.Sprint(b.Eval(`document.querySelector('#alert').textContent`))
	if !strings.Contains(text, "Worker 2 is slow") || !strings.Contains(text, "Cause: input") {
		t.Errorf("alert: %s", text)
	}
	b.Click("#b-loss")
	b.Await(`document.querySelector('#b-loss').getAttribute('aria-expanded') === 'true' &&
		document.querySelectorAll('[aria-label="Loss, numbers"] tbody tr').length === 60`)
	b.Eval(`document.querySelector('#workers tbody tr').cells[4].mark = true`)
	b.Eval(`document.querySelector('#now dd').mark = true`)
	b.Eval(`document.querySelector('[aria-label="Loss, numbers"] tbody tr').mark = true`)
	add(source, 61, 75)
	b.Await(`document.querySelectorAll('[aria-label="Loss, numbers"] tbody tr').length === 75 &&
		document.querySelector('#now').innerText.includes('75')`)
	for _, cell := range []string{
		`#workers tbody tr').cells[4]`, `#now dd')`, `[aria-label="Loss, numbers"] tbody tr:nth-child(16)')`,
	} { // a screen reader keeps its place
		if b.Eval(`document.querySelector('`+cell+`.mark`) != true {
			t.Errorf("%s was replaced by the update", cell)
		}
	}
	// A page whose connection was lost shows every point once.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	b.Await(`document.querySelector('#state').textContent.includes('lost')`)
	again, err := Listen(s.listener.Addr().String(), source, "")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	b.Await(`document.querySelector('#state').textContent.startsWith('Live')`)
	if n := b.Eval(`document.querySelectorAll('[aria-label="Loss, numbers"] tbody tr').length`); n != 75.0 {
		t.Errorf("after the connection was lost, the page shows %v steps: want 75", n)
	}
	b.Click("#b-loss")
	b.Await(`document.querySelector('[aria-label="Loss, numbers"]').hidden`)
	for _, want := range []string{ // each expression is one that the page of a training makes true
		`document.querySelector('#now').innerText.includes('1 h 02 min')`, // the time left
		`document.querySelector('#now').innerText.includes('Images/s')`,
		`document.querySelector('#settings').innerText.includes('resnet18')`,
		`!document.querySelector('#settings').closest('section').hidden`,
		`document.querySelector('[aria-label="Learning rate by step. Last: learning rate 0.0001333"]') !== null`,
		`charts['m-accuracy'].plot.axes[1].label === 'accuracy, epoch so far' && charts.rate.plot.axes[1].label === 'images / s'`,
		`charts['m-accuracy'].plot.data[3].filter((x) => x !== null).length === 3`, // of validations: at the steps 20, 40, 60
		`charts.loss.plot.scales.y.distr !== 3`,
		`Object.values(charts).every((c) => c.plot.width === c.box.clientWidth)`,
	} {
		if b.Eval(want) != true {
			t.Errorf("false: %s", want)
		}
	}
	b.Click("#l-loss")
	b.Await(`charts.loss.plot.scales.y.distr === 3 && document.querySelector('#l-loss').getAttribute('aria-pressed') === 'true'`)
	b.Eval(`document.querySelector('#smoothing').value = 0.9, document.querySelector('#smoothing').dispatchEvent(new Event('input'))`)
	b.Await(`charts.loss.plot.data[2][0] === charts.loss.plot.data[1][0] && charts.loss.plot.data[2][59] > charts.loss.plot.data[1][59]`)
	if file := os.Getenv("LOCKSTEP_AXE"); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		b.Eval(string(text) + "; 0")
		found := b.Eval(`axe.run().then((r) => r.violations.filter((v) => v.impact === 'serious' || v.impact === 'critical')
			.map((v) => v.id + ': ' + v.help + ' ' + v.nodes.map((n) => n.html).join(' ')).join('\n'))`)
		if found != "" {
			t.Errorf("axe finds serious faults:\n%s", found)
		}
	} else {
		t.Log("LOCKSTEP_AXE does not name axe.min.js: accessibility is not checked")
	}
	addSlowLink(source)
	b.Await(`document.querySelector('#alert').textContent.includes('The network link from worker 1 to worker 2 is slow, ' +
		'and all workers wait for it: its data takes 30.0 ms a step, on the other links 2.0 ms.') &&
		Array.from(document.querySelectorAll('#workers tbody th')).filter((c) => c.textContent.includes('(slow)')).length === 2`)
	b.Resize(360, 740)
	b.Await(`window.innerWidth === 360`)
	if wide := b.Eval(`document.scrollingElement.scrollWidth`).(float64); wide > 360 {
		t.Errorf("on a phone of 360 pixels the page is %v wide", wide)
	}
	for _, url := range b.Requests {
		if !strings.HasPrefix(url, s.URL()) && !strings.HasPrefix(url, "data:") {
			t.Errorf("a request to the outside: %s", url)
		}
	}
	if len(b.Requests) < 5 {
		t.Errorf("only %d requests were seen", len(b.Requests))
	}
}
