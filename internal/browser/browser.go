// Package browser drives a headless Chromium by its DevTools protocol over a pipe, for tests.
package browser

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
)

// Browser is a headless Chromium, driven by its DevTools protocol over a pipe.
type Browser struct {
	t        testing.TB
	out      io.Writer
	in       *bufio.Reader
	session  string
	id       int
	Requests []string // URLs that the page has requested
}

// Open starts Chromium, or skips the test.
func Open(t testing.TB) *Browser {
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
	b := &Browser{t: t, out: toWrite, in: bufio.NewReader(fromRead)}
	t.Cleanup(func() {
		b.session = ""
		b.Call("Browser.close", nil)
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

// Call calls a method of the protocol and returns its result.
func (b *Browser) Call(method string, params map[string]any) map[string]any {
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
			b.Requests = append(b.Requests, m.Params.Request.URL)
		}
		if m.ID == b.id {
			if m.Error != nil {
				b.t.Fatalf("%s: %s", method, m.Error.Message)
			}
			return m.Result
		}
	}
}

// Visit opens a page of a size.
func (b *Browser) Visit(url string, width, height int) {
	b.t.Helper()
	if b.session == "" {
		target := b.Call("Target.createTarget", map[string]any{"url": "about:blank"})["targetId"]
		b.session = b.Call("Target.attachToTarget", map[string]any{"targetId": target, "flatten": true})["sessionId"].(string)
		b.Call("Network.enable", nil)
		b.Call("Page.enable", nil)
	}
	b.Resize(width, height)
	b.Call("Page.navigate", map[string]any{"url": url})
}

// Resize sets the size of the page.
func (b *Browser) Resize(width, height int) {
	b.Call("Emulation.setDeviceMetricsOverride", map[string]any{
		"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600,
	})
}

// Eval returns the value of a JavaScript expression, or of the promise that it is.
func (b *Browser) Eval(expression string) any {
	b.t.Helper()
	r := b.Call("Runtime.evaluate", map[string]any{
		"expression": expression, "awaitPromise": true, "returnByValue": true,
	})
	if e, ok := r["exceptionDetails"]; ok {
		b.t.Fatalf("%.200s: %v", expression, e)
	}
	return r["result"].(map[string]any)["value"]
}

// Await waits until an expression is true.
func (b *Browser) Await(expression string) {
	b.t.Helper()
	for range 300 {
		if b.Eval(expression) == true {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	b.t.Fatalf("%s does not become true; the page shows %v", expression, b.Eval("document.body.innerText"))
}

// Click clicks the middle of an element with the mouse.
func (b *Browser) Click(selector string) {
	b.t.Helper()
	at := b.Eval(fmt.Sprintf(`(() => { const e = document.querySelector(%q); e.scrollIntoView({block: 'center'});
		const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()`, selector)).([]any)
	for _, kind := range []string{"mousePressed", "mouseReleased"} {
		b.Call("Input.dispatchMouseEvent", map[string]any{
			"type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1,
		})
	}
}

// Picture returns a screenshot of the part of the page that its size shows, as PNG.
func (b *Browser) Picture() []byte {
	b.t.Helper()
	b.Call("Emulation.setScrollbarsHidden", map[string]any{"hidden": true})
	shot := b.Call("Page.captureScreenshot", nil)
	png, err := base64.StdEncoding.DecodeString(shot["data"].(string))
	if err != nil {
		b.t.Fatal(err)
	}
	return png
}
