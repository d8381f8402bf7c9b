package dashboard

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// browser is a headless Chromium, driven by its DevTools protocol over a pipe.
type browser struct {
	t        *testing.T
	out      io.Writer
	in       *bufio.Reader
	session  string
	id       int
	requests []string // URLs that the page has requested
}

// openBrowser starts Chromium, or skips the test.
func openBrowser(t *testing.T) *browser {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: it starts a browser")
	}
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
			break
		}
	}
	if path == "" {
		t.Skip("no Chromium is installed: apt-get install chromium")
	}
	toRead, toWrite, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	fromRead, fromWrite, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
		"--disable-background-networking", "--remote-debugging-pipe", "--user-data-dir="+t.TempDir())
	cmd.ExtraFiles = []*os.File{toRead, fromWrite}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	toRead.Close()
	fromWrite.Close()
	b := &browser{t: t, out: toWrite, in: bufio.NewReader(fromRead)}
	t.Cleanup(func() {
		b.session = ""
		b.call("Browser.close", nil)
		toWrite.Close()
		fromRead.Close()
		timer := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // some versions exit with a code
		timer.Stop()
	})
	deadline := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() { deadline.Stop() })
	return b
}

// call calls a method of the protocol and returns its result.
func (b *browser) call(method string, params map[string]any) map[string]any {
	b.t.Helper()
	b.id++
	message := map[string]any{"id": b.id, "method": method, "params": params}
	if params == nil {
		message["params"] = map[string]any{}
	}
	if b.session != "" {
		message["sessionId"] = b.session
	}
	text, err := json.Marshal(message)
	if err == nil {
		_, err = b.out.Write(append(text, 0))
	}
	if err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	for {
		text, err := b.in.ReadBytes(0)
		if err != nil {
			if method == "Browser.close" {
				return nil
			}
			b.t.Fatalf("%s: the browser has ended: %v", method, err)
		}
		var m struct {
			ID     int
			Method string
			Params struct{ Request struct{ URL string } }
			Result map[string]any
			Error  *struct{ Message string }
		}
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			b.t.Fatalf("%s: %v", method, err)
		}
		if m.Method == "Network.requestWillBeSent" {
			b.requests = append(b.requests, m.Params.Request.URL)
		}
		if m.ID == b.id {
			if m.Error != nil {
				b.t.Fatalf("%s: %s", method, m.Error.Message)
			}
			return m.Result
		}
	}
}

// visit opens a page of a size.
func (b *browser) visit(url string, width, height int) {
	b.t.Helper()
	if b.session == "" {
		target := b.call("Target.createTarget", map[string]any{"url": "about:blank"})["targetId"]
		b.session = b.call("Target.attachToTarget", map[string]any{"targetId": target, "flatten": true})["sessionId"].(string)
		b.call("Network.enable", nil)
		b.call("Page.enable", nil)
	}
	b.resize(width, height)
	b.call("Page.navigate", map[string]any{"url": url})
}

func (b *browser) resize(width, height int) {
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{
		"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600,
	})
}

// eval returns the value of a JavaScript expression, or of the promise that it is.
func (b *browser) eval(expression string) any {
	b.t.Helper()
	r := b.call("Runtime.evaluate", map[string]any{
		"expression": expression, "awaitPromise": true, "returnByValue": true,
	})
	if e, ok := r["exceptionDetails"]; ok {
		b.t.Fatalf("%.200s: %v", expression, e)
	}
	return r["result"].(map[string]any)["value"]
}

// await waits until an expression is true.
func (b *browser) await(expression string) {
	b.t.Helper()
	for range 300 {
		if b.eval(expression) == true {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	b.t.Fatalf("%s does not become true; the page shows %v", expression, b.eval("document.body.innerText"))
}

// click clicks the middle of an element with the mouse.
func (b *browser) click(selector string) {
	b.t.Helper()
	at := b.eval(fmt.Sprintf(`(() => { const e = document.querySelector(%q); e.scrollIntoView({block: 'center'});
		const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()`, selector)).([]any)
	for _, kind := range []string{"mousePressed", "mouseReleased"} {
		b.call("Input.dispatchMouseEvent", map[string]any{
			"type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1,
		})
	}
}

// picture writes a screenshot into the folder of LOCKSTEP_SCREENSHOTS, if it is set.
func (b *browser) picture(name string) {
	folder := os.Getenv("LOCKSTEP_SCREENSHOTS")
	if folder == "" {
		return
	}
	shot := b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true})
	png, err := base64.StdEncoding.DecodeString(shot["data"].(string))
	if err == nil {
		err = os.WriteFile(folder+"/"+name+".png", png, 0o644)
	}
	if err != nil {
		b.t.Error(err)
	}
}

// TestPage uses the page in a browser: what it shows, what a click does, on a phone, and which requests it makes. With
// LOCKSTEP_AXE, the path of axe.min.js (npm's axe-core), it also checks that axe finds no serious fault.
func TestPage(t *testing.T) {
	b := openBrowser(t)
	s, source := open(t, "127.0.0.1:0", "")
	b.visit(s.URL(), 1280, 1500)
	b.await(`document.querySelectorAll('#workers tbody tr').length === 4 && document.querySelectorAll('.chart canvas').length >= 4`)
	text := fmt.Sprint(b.eval(`document.querySelector('#alert').textContent`))
	if !strings.Contains(text, "Worker 2 is slow") || !strings.Contains(text, "Cause: input") {
		t.Errorf("alert: %s", text)
	}
	b.picture("dashboard")
	b.click("#b-loss")
	b.await(`document.querySelector('#b-loss').getAttribute('aria-expanded') === 'true' &&
		document.querySelectorAll('[aria-label="Loss, numbers"] tbody tr').length === 60`)
	b.eval(`document.querySelector('#workers tbody tr').cells[4].mark = true`)
	b.eval(`document.querySelector('#now dd').mark = true`)
	b.eval(`document.querySelector('[aria-label="Loss, numbers"] tbody tr').mark = true`)
	add(source, 61, 75)
	b.await(`document.querySelectorAll('[aria-label="Loss, numbers"] tbody tr').length === 75 &&
		document.querySelector('#now').innerText.includes('75')`)
	for _, cell := range []string{
		`#workers tbody tr').cells[4]`, `#now dd')`, `[aria-label="Loss, numbers"] tbody tr:nth-child(16)')`,
	} { // a screen reader keeps its place
		if b.eval(`document.querySelector('`+cell+`.mark`) != true {
			t.Errorf("%s was replaced by the update", cell)
		}
	}
	// A page whose connection was lost shows every point once.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	b.await(`document.querySelector('#state').textContent.includes('lost')`)
	again, err := Listen(s.listener.Addr().String(), source, "")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	b.await(`document.querySelector('#state').textContent.startsWith('Live')`)
	if n := b.eval(`document.querySelectorAll('[aria-label="Loss, numbers"] tbody tr').length`); n != 75.0 {
		t.Errorf("after the connection was lost, the page shows %v steps: want 75", n)
	}
	b.click("#b-loss")
	b.await(`document.querySelector('[aria-label="Loss, numbers"]').hidden`)
	if file := os.Getenv("LOCKSTEP_AXE"); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		b.eval(string(text) + "; 0")
		found := b.eval(`axe.run().then((r) => r.violations.filter((v) => v.impact === 'serious' || v.impact === 'critical')
			.map((v) => v.id + ': ' + v.help + ' ' + v.nodes.map((n) => n.html).join(' ')).join('\n'))`)
		if found != "" {
			t.Errorf("axe finds serious faults:\n%s", found)
		}
	} else {
		t.Log("LOCKSTEP_AXE does not name axe.min.js: accessibility is not checked")
	}
	b.resize(360, 740)
	b.await(`window.innerWidth === 360`)
	if wide := b.eval(`document.scrollingElement.scrollWidth`).(float64); wide > 360 {
		t.Errorf("on a phone of 360 pixels the page is %v wide", wide)
	}
	b.picture("dashboard-phone")
	for _, url := range b.requests {
		if !strings.HasPrefix(url, s.URL()) && !strings.HasPrefix(url, "data:") {
			t.Errorf("a request to the outside: %s", url)
		}
	}
	if len(b.requests) < 5 {
		t.Errorf("only %d requests were seen", len(b.requests))
	}
}
