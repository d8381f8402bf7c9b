package secret_test

import (
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// setUp starts a job of three processes, an unrelated process that listens at an address, and one that floods.
func setUp(b *testing.B) (all []*process, unrelated *process, addr string, flood *process) {
	b.Helper()
	s := secret.New()
	for r, host := range []string{"a", "a", "b"} {
		all = append(all, start(b, worker{Rank: r, Size: 3, Secret: s.Text(), Encrypt: true, Host: host}, nil))
	}
	joinAll(b, all)
	ask(b, all, "train 5")
	unrelated = start(b, worker{Role: "unrelated"}, nil)
	return all, unrelated, ask(b, []*process{unrelated}, "listen")[0], flooder(b, s, all)
}

// BenchmarkUnderAttack times the steps of a job of three processes while another process makes 1,000 hostile
// connections a second: to the job, and for comparison to the port of an unrelated process, which accepts, reads as
// much as a worker would and closes. An iteration is a round of both, shortly after each other, so that other load on
// the machine affects both; the metrics are the medians of the rounds' ratios. Run it with -benchtime 30x or more.
func BenchmarkUnderAttack(b *testing.B) {
	const steps, settle = 300, 100
	all, _, addr, flood := setUp(b)
	targets := map[string]string{"none": "", "unrelated": addr}
	for _, p := range all {
		targets["job"] += " " + p.addr
	}
	took := map[string][]float64{} // median of a step, by round
	mean := map[string][]float64{}
	round := func(target string) {
		ask(b, []*process{flood}, "aim %s", targets[target])
		timed(b, all, "reduce", 4*elements, settle)
		each := timed(b, all, "reduce", 4*elements, steps)
		slices.Sort(each)
		sum := 0.0
		for _, t := range each {
			sum += t
		}
		took[target] = append(took[target], each[steps/2])
		mean[target] = append(mean[target], sum/steps)
	}
	b.ResetTimer()
	for i := range b.N {
		order := []string{"none", "unrelated", "job"}
		if i%2 == 1 {
			slices.Reverse(order)
		}
		for _, target := range order {
			round(target)
		}
	}
	b.StopTimer()
	ask(b, []*process{flood}, "aim")
	b.ReportMetric(0, "ns/op")
	for _, target := range []string{"none", "unrelated", "job"} {
		b.ReportMetric(middle(took[target])*1e6, "µs/"+target)
	}
	b.ReportMetric(100*(middle(ratios(took["job"], took["unrelated"]))-1), "%/step")
	b.ReportMetric(100*(middle(ratios(mean["job"], mean["unrelated"]))-1), "%/mean-step")
	b.ReportMetric(100*(middle(ratios(took["unrelated"], took["none"]))-1), "%/attack-itself")
	ask(b, all, "leave")
}

// BenchmarkHostileConnection counts the processor time that a hostile connection costs its target: an idle worker, or
// the unrelated process. An iteration is a second at each.
func BenchmarkHostileConnection(b *testing.B) {
	all, unrelated, addr, flood := setUp(b)
	spent, made := map[string]float64{}, map[string]float64{}
	for range b.N {
		for who, p := range map[string]*process{all[0].addr: all[0], addr: unrelated} {
			before := spentBy(b, p)
			ask(b, []*process{flood}, "aim %s", who)
			time.Sleep(time.Second)
			n, err := strconv.Atoi(ask(b, []*process{flood}, "aim")[0])
			if err != nil {
				b.Fatal(err)
			}
			made[who] += float64(n)
			spent[who] += (spentBy(b, p) - before).Seconds()
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(1e6*spent[addr]/made[addr], "µs/unrelated")
	b.ReportMetric(1e6*spent[all[0].addr]/made[all[0].addr], "µs/job")
	ask(b, all, "leave")
}

// spentBy returns the processor time that a process has used.
func spentBy(b *testing.B, p *process) time.Duration {
	d, err := time.ParseDuration(ask(b, []*process{p}, "spent")[0])
	if err != nil {
		b.Fatal(err)
	}
	return d
}

// flooder starts a process that makes hostile connections.
func flooder(b *testing.B, s secret.Secret, all []*process) *process {
	flood := start(b, worker{Role: "flood"}, nil)
	text, err := json.Marshal(hostiles(b, s, all))
	if err != nil {
		b.Fatal(err)
	}
	ask(b, []*process{flood}, "%s", text)
	return flood
}

func ratios(a, b []float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = a[i] / b[i]
	}
	return out
}

func middle(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return (x[(len(x)-1)/2] + x[len(x)/2]) / 2
}

// hostile is a hostile connection whose bytes are all known in advance, so it costs the attacker the same at any
// target.
type hostile struct {
	Bytes []byte
	Times int  // number of repetitions
	Keep  bool // the connection stays open
}

// hostiles returns connections of the kinds of TestHostile.
func hostiles(b *testing.B, s secret.Secret, all []*process) []hostile {
	a := newAttacker(b, s, all...)
	r := rand.New(rand.NewPCG(1, 2))
	tlsHello := clientHello(b, a)
	var out []hostile
	for sent := range slices.Values(slices.Concat(a.tapes[all[0].addr], a.tapes[all[1].addr])) {
		hello := sent[:helloBytes]
		out = append(out,
			hostile{Bytes: random(r, 1+r.IntN(4000))},
			hostile{Bytes: append([]byte{0x16, 3, 1}, random(r, 1+r.IntN(4000))...)},
			hostile{Bytes: [][]byte{nil, {0x16}, {0x16, 3, 1, 2, 0, 1}, []byte("L"), []byte("LOCKSTEP")}[r.IntN(5)], Keep: true},
			hostile{Bytes: append([]byte("LOCKSTEP"), make([]byte, 1<<14)...), Times: 64},
			hostile{Bytes: tlsHello},
			hostile{Bytes: slices.Concat(hello, tlsHello)},
			hostile{Bytes: slices.Concat(hello, random(r, 64))},
			hostile{Bytes: a.otherJob},
			hostile{Bytes: sent[:min(len(sent), 4000)]},
			hostile{Bytes: hello, Keep: true},
		)
	}
	return out
}

// clientHello returns the bytes of an attacker that starts TLS at once.
func clientHello(b *testing.B, a *attacker) []byte {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	var tape tapes
	c, err := tape.dial(b.Context(), "tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	other, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		other.Read(make([]byte, 1))
		other.Close()
	}()
	a.handshake(c)
	c.Close()
	return tape.all[0].wrote
}

const (
	floodPerSecond = 1000
	lingerFor      = 20 * time.Millisecond
)

// flood makes the hostile connections of the first line, at the targets of each later line: "aim address…". For each
// line it prints how many it has made since the line before.
func (w *worker) flood() {
	w.check(json.Unmarshal([]byte(w.line()), &w.hostiles))
	w.print("ready")
	var aim chan struct{}
	var work sync.WaitGroup
	made := 0
	a := &attacker{kept: map[net.Conn]bool{}}
	for {
		f := strings.Fields(w.line())
		if aim != nil {
			close(aim)
			work.Wait()
			aim = nil
		}
		if len(f) > 1 {
			aim = make(chan struct{})
			work.Go(func() { made = w.strike(a, f[1:], aim) })
		}
		w.print(strconv.Itoa(made))
	}
}

// strike makes floodPerSecond connections a second until over is closed, and returns their number.
func (w *worker) strike(a *attacker, addrs []string, over <-chan struct{}) int {
	tick := time.NewTicker(time.Second / floodPerSecond)
	defer tick.Stop()
	var work sync.WaitGroup
	defer work.Wait()
	for i := 0; ; i++ {
		select {
		case <-tick.C:
			work.Go(func() { w.connect(a, addrs[i/len(w.hostiles)%len(addrs)], w.hostiles[i%len(w.hostiles)]) })
		case <-over:
			return i
		}
	}
}

func (w *worker) connect(a *attacker, addr string, how hostile) {
	c, err := net.Dial("tcp", addr)
	w.check(err)
	c.SetDeadline(time.Now().Add(30 * time.Second))
	for range max(how.Times, 1) {
		if _, err := c.Write(how.Bytes); err != nil {
			break
		}
	}
	if how.Keep {
		a.keep(c)
		return
	}
	c.SetReadDeadline(time.Now().Add(lingerFor))
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		a.keep(c)
		return
	}
	c.Close()
}

// unrelated is a server that does not belong to the job: it reads a request of the length of a worker's hello and
// proof, for as long as a worker would, and closes.
func (w *worker) unrelated() {
	w.line()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	w.check(err)
	w.print(l.Addr().String())
	go func() {
		for w.line() == "spent" {
			w.print(spent())
		}
	}()
	for {
		c, err := l.Accept()
		w.check(err)
		go func() {
			c.SetDeadline(time.Now().Add(10 * time.Second))
			io.ReadFull(c, make([]byte, helloBytes+2*32))
			c.Close()
		}()
	}
}
