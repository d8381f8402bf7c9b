package tcp_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/internal/transport/overlay"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// Tests with real processes run this test binary again, as a child with one of these roles.
const childEnv = "LOCKSTEP_TCP_TEST_CHILD"

var parts = map[string]func(c *child){}

func TestMain(m *testing.M) {
	if part := os.Getenv(childEnv); part != "" {
		c := &child{in: bufio.NewReader(os.Stdin)}
		parts[part](c)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// child is the child's side of a child process: it exchanges lines with its parent.
type child struct{ in *bufio.Reader }

func (c *child) read() string {
	line, err := c.in.ReadString('\n')
	if err != nil {
		os.Exit(0) // the parent has exited, or needs no more
	}
	return strings.TrimSpace(line)
}

func (c *child) say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func (c *child) check(err error) {
	if err != nil {
		c.say("error %v", err)
		os.Exit(1)
	}
}

// join opens a node, prints its address, reads its rank and all addresses ("RANK ADDR0 ADDR1 …"), and joins.
func (c *child) join(cfg tcp.Config) (*tcp.Node, transport.Endpoint) {
	node, err := tcp.Listen(cfg)
	c.check(err)
	node.SetMeshMax(envInt("MESH", overlay.MeshMax))
	c.say("at %s", node.Addr())
	fields := strings.Fields(c.read())
	var rank int
	fmt.Sscan(fields[0], &rank)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	ends, err := node.Group(ctx, tcp.GroupConfig{Addrs: fields[1:], Local: []int{rank}})
	c.check(err)
	c.say("joined")
	return node, ends[0]
}

// process is the parent's side of a child process.
type process struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start starts a child with a role. It is killed when the test ends.
func start(t testing.TB, part string, env ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, cmd: exec.Command(exe)}
	p.cmd.Env = append(append(os.Environ(), childEnv+"="+part), env...)
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.in.Close()
		p.cmd.Wait()
	})
	return p
}

// expect reads a line that begins with the word, and returns the rest.
func (p *process) expect(word string) string {
	p.t.Helper()
	line, err := p.out.ReadString('\n')
	rest, ok := strings.CutPrefix(strings.TrimSpace(line), word)
	if err != nil || !ok {
		p.t.Fatalf("a child printed %q (%v), want %q", strings.TrimSpace(line), err, word)
	}
	return strings.TrimSpace(rest)
}

func (p *process) tell(format string, args ...any) {
	p.t.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.t.Fatalf("writing to a child: %v", err)
	}
}

// startAll starts n children that join, through the addresses that via returns for theirs.
func startAll(t testing.TB, n int, part string, via func(rank int, addr string) string, env ...string) []*process {
	t.Helper()
	var all []*process
	addrs := make([]string, n)
	for r := range n {
		p := start(t, part, env...)
		all = append(all, p)
		addrs[r] = p.expect("at")
		if via != nil {
			addrs[r] = via(r, addrs[r])
		}
	}
	for r, p := range all {
		p.tell("%d %s", r, strings.Join(addrs, " "))
	}
	for _, p := range all {
		p.expect("joined")
	}
	return all
}

func init() {
	parts["echo"] = func(c *child) { // sends back what it receives, of the sizes that it reads
		_, e := c.join(tcp.Config{})
		bare := c.bare()
		for {
			var size, times int
			var kind string
			fmt.Sscan(c.read(), &kind, &size, &times)
			out, in := make([]byte, size), make([]byte, size)
			for range times {
				switch kind {
				case "exchange":
					c.check(e.Exchange(context.Background(), 0, transport.Frame{Data: out}, 0, in))
				case "bare":
					c.check(bothWays(bare, out, in))
				}
			}
		}
	}
}

func envInt(name string, def int) int {
	fmt.Sscan(os.Getenv(name), &def)
	return def
}

// bare opens a plain connection with the parent.
func (c *child) bare() net.Conn {
	conn, err := net.Dial("tcp", os.Getenv("BARE"))
	c.check(err)
	return conn
}

// bothWays is the bare exchange: plain writes and reads, by two goroutines.
func bothWays(conn net.Conn, out, in []byte) error {
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write(out)
		wrote <- err
	}()
	if _, err := io.ReadFull(conn, in); err != nil {
		return err
	}
	return <-wrote
}

// BenchmarkExchange measures an exchange of so many bytes in each direction between two processes on loopback, and
// beside it the same bytes by plain writes and reads.
func BenchmarkExchange(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	peer := start(b, "echo", "BARE="+l.Addr().String())
	node, err := tcp.Listen(tcp.Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer node.Close()
	addrs := []string{node.Addr(), peer.expect("at")}
	peer.tell("1 %s", strings.Join(addrs, " "))
	ends, err := node.Group(context.Background(), tcp.GroupConfig{Addrs: addrs, Local: []int{0}})
	if err != nil {
		b.Fatal(err)
	}
	peer.expect("joined")
	e := ends[0]
	bare, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	defer bare.Close()
	for _, size := range []int{4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20} {
		out, in := make([]byte, size), make([]byte, size)
		b.Run(fmt.Sprintf("exchange/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			peer.tell("exchange %d %d", size, b.N)
			for range b.N {
				if err := e.Exchange(context.Background(), 1, transport.Frame{Data: out}, 1, in); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("bare/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			peer.tell("bare %d %d", size, b.N)
			for range b.N {
				if err := bothWays(bare, out, in); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
