package shm

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// protocolVersion changes with the handshake and with the layout of the control file.
const protocolVersion = 1

// hello is what a process that dials says first.
type hello struct {
	Protocol string
	Version  int
	Arch     string
	Job      string
	Epoch    uint32
	Group    uint64
	Size     int
	Ranks    []int
	Nonce    []byte
}

// answer is what it is told then: why it is refused, or what proves that the other side knows the token.
type answer struct {
	Refused string
	Nonce   []byte
	Proof   []byte
}

// proof is what proves that it knows the token; the file of its arena follows.
type proof struct{ Proof []byte }

// welcome says why it is refused after all, or who is in the group, by number of the process. The control file follows, the
// arenas of all other processes, and the sockets to those that do not listen.
type welcome struct {
	Refused   string
	Processes []member
	You       int
}

type member struct {
	Pid   int
	Ranks []int
}

const (
	protocolName = "lockstep shm"
	messageMax   = 64 << 10
	helloTime    = 5 * time.Second // for a process that has dialled
)

// HostID returns a text that is equal in two processes if they can share memory: those of one boot of one kernel, of one
// network namespace and one user, and of one architecture. It returns "" if this process cannot share memory at all.
func HostID() string {
	f, err := newFile("lockstep-probe", 1)
	if err != nil {
		return ""
	}
	f.Close()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	network, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return ""
	}
	users, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s %s %s %d %s", strings.TrimSpace(string(boot)), network, users, os.Getuid(), runtime.GOARCH)
}

// address is the abstract socket of a group. Such a name vanishes with the socket.
func address(name string) *net.UnixAddr {
	sum := sha256.Sum256([]byte(name))
	return &net.UnixAddr{Net: "unix", Name: "@lockstep-" + hex.EncodeToString(sum[:16])}
}

// meet brings the processes of the group together.
func meet(ctx context.Context, cfg Config) (*world, error) {
	w := &world{cfg: cfg}
	bytes := int64(cfg.ArenaBytes)
	if bytes == 0 {
		var err error
		if bytes, err = arenaBytes(cfg.Size); err != nil {
			return nil, err
		}
	}
	var err error
	if w.arena, err = newArena(int64(up(int(bytes), page))); err != nil {
		return nil, err
	}
	if cfg.Ranks[0] == 0 {
		err = w.host(ctx)
	} else {
		err = w.dial(ctx)
	}
	if err != nil {
		w.abandon()
		return nil, err
	}
	w.processOf = make([]int, cfg.Size)
	for i := range w.processes {
		for _, r := range w.processes[i].ranks {
			w.processOf[r] = i
		}
	}
	w.processes[w.me].mem = w.arena.mem
	return w, nil
}

// abandon gives back what an Open that did not come to its end has.
func (w *world) abandon() {
	if w.control == nil {
		w.control = os.NewFile(^uintptr(0), "")
	}
	w.close()
}

// hello is what this process says of itself.
func (c *Config) hello() hello {
	return hello{
		Protocol: protocolName, Version: protocolVersion, Arch: runtime.GOARCH,
		Job: c.Job, Epoch: c.Epoch, Group: c.Group, Size: c.Size, Ranks: c.Ranks, Nonce: nonce(),
	}
}

// differ returns what of another process's hello does not fit this one's, or "".
func (h *hello) differ(from *hello) string {
	for _, f := range []struct {
		name         string
		theirs, ours any
	}{
		{"protocol", h.Protocol, from.Protocol},
		{"version of the protocol", h.Version, from.Version},
		{"architecture", h.Arch, from.Arch},
		{"job", h.Job, from.Job},
		{"epoch", h.Epoch, from.Epoch},
		{"group", h.Group, from.Group},
		{"size of the group", h.Size, from.Size},
	} {
		if f.theirs != f.ours {
			return fmt.Sprintf("the %s is %v there, and %v here", f.name, quoted(f.theirs), quoted(f.ours))
		}
	}
	if len(h.Nonce) != nonceBytes {
		return "its hello is not whole"
	}
	if len(h.Ranks) == 0 || checkRanks(h.Ranks, from.Size) != nil {
		return fmt.Sprintf("it claims the ranks %v of %d", h.Ranks, from.Size)
	}
	return ""
}

func quoted(v any) any {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return v
}

// porch is where a process that listens receives the others.
type porch struct {
	cfg      *Config
	own      hello
	listener *net.UnixListener
	stop     context.CancelFunc
	greeters sync.WaitGroup
	came     chan struct{} // somebody is there, or was refused

	mu      sync.Mutex
	guests  []*guest
	seated  bool   // all are there
	refused string // the last refusal
}

// guest is a process that was let in.
type guest struct {
	conn  *net.UnixConn
	pid   int
	ranks []int
	arena *os.File
}

// host is meet for the process that listens.
func (w *world) host(ctx context.Context) error {
	control, err := newFile("lockstep-control", tableBytes+int64(layoutOf(w.cfg.Size).bytes)*(1+splitsMax))
	if err != nil {
		return err
	}
	w.control = control
	w.processes = []process{{pid: os.Getpid(), ranks: w.cfg.Ranks}}
	if len(w.cfg.Ranks) == w.cfg.Size {
		return nil
	}
	l, err := net.ListenUnix("unix", address(w.cfg.Name))
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("shm: another process on this host has opened rank 0 of %q: %w", w.cfg.Name, err)
	}
	if err != nil {
		return fmt.Errorf("shm: listening for the other processes of %q: %w", w.cfg.Name, err)
	}
	greeting, stop := context.WithCancel(context.Background())
	p := &porch{cfg: &w.cfg, own: w.cfg.hello(), listener: l, stop: stop, came: make(chan struct{}, 1)}
	w.porch = p
	p.greeters.Go(func() { p.receive(greeting) })
	for !p.complete() {
		select {
		case <-p.came:
		case <-ctx.Done():
			return p.missing(ctx)
		}
	}
	return w.seat(ctx, p)
}

// receive lets in who comes, until the listener is closed.
func (p *porch) receive(ctx context.Context) {
	for {
		conn, err := p.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, say
			select {
			case <-ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
				continue
			}
		}
		p.greeters.Go(func() {
			limited, cancel := context.WithTimeout(ctx, helloTime)
			defer cancel()
			err := p.greet(limited, conn)
			if err != nil {
				conn.Close()
			}
			p.mu.Lock()
			if err != nil {
				p.refused = err.Error()
			}
			p.mu.Unlock()
			select {
			case p.came <- struct{}{}:
			default:
			}
		})
	}
}

// greet lets a process in, or refuses it and says why.
func (p *porch) greet(ctx context.Context, conn *net.UnixConn) error {
	release := bound(ctx, conn)
	pid, err := checkUser(conn)
	if err != nil {
		return err
	}
	var h hello
	if err := receive(conn, &h); err != nil {
		return fmt.Errorf("process %d said no hello: %w", pid, err)
	}
	if why := p.own.differ(&h); why != "" {
		send(conn, answer{Refused: why})
		return fmt.Errorf("process %d was refused: %s", pid, why)
	}
	own := nonce()
	if err := send(conn, answer{Nonce: own, Proof: p.cfg.sign("host", h.Nonce, own)}); err != nil {
		return fmt.Errorf("process %d left: %w", pid, err)
	}
	var proved proof
	if err := receive(conn, &proved); err != nil {
		return fmt.Errorf("process %d has another token, or left: %w", pid, err)
	}
	g := &guest{conn: conn, pid: pid, ranks: h.Ranks}
	if g.arena, err = receiveFile(conn); err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	why := "its token is another one"
	if hmac.Equal(proved.Proof, p.cfg.sign("guest", own, h.Nonce)) {
		if err := release(); err != nil {
			g.arena.Close()
			return fmt.Errorf("process %d was too slow: %w", pid, err)
		}
		why = p.admit(g)
	}
	if why != "" {
		g.arena.Close()
		send(conn, welcome{Refused: why})
		return fmt.Errorf("process %d was refused: %s", pid, why)
	}
	return nil
}

// admit notes the ranks of a process, unless they are taken.
func (p *porch) admit(g *guest) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.guests = slices.DeleteFunc(p.guests, func(other *guest) bool {
		if !p.seated && other.left() {
			other.conn.Close()
			other.arena.Close()
			return true
		}
		return false
	})
	taken := append(p.guests[:len(p.guests):len(p.guests)], &guest{pid: os.Getpid(), ranks: p.cfg.Ranks})
	for _, other := range taken {
		for _, r := range g.ranks {
			if slices.Contains(other.ranks, r) {
				return fmt.Sprintf("rank %d is taken by process %d", r, other.pid)
			}
		}
	}
	p.guests = append(p.guests, g)
	return ""
}

// left reports whether the process at the other end is gone.
func (g *guest) left() bool {
	raw, err := g.conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		gone = n == 0 && err == nil || err != nil && err != unix.EAGAIN && err != unix.EINTR
	})
	return gone || err != nil
}

// complete reports whether all ranks are there.
func (p *porch) complete() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.cfg.Ranks)
	for _, g := range p.guests {
		n += len(g.ranks)
	}
	p.seated = n == p.cfg.Size
	return p.seated
}

// missing says who did not come.
func (p *porch) missing(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	here := slices.Clone(p.cfg.Ranks)
	for _, g := range p.guests {
		here = append(here, g.ranks...)
	}
	var away []int
	for r := range p.cfg.Size {
		if !slices.Contains(here, r) {
			away = append(away, r)
		}
	}
	text := ""
	if p.refused != "" {
		text = " (" + p.refused + ")"
	}
	return fmt.Errorf("shm: waiting for ranks %v of %q%s: %w", away, p.cfg.Name, text, context.Cause(ctx))
}

// seat hands every process what it needs.
func (w *world) seat(ctx context.Context, p *porch) error {
	p.mu.Lock()
	guests := slices.Clone(p.guests)
	p.mu.Unlock()
	slices.SortFunc(guests, func(a, b *guest) int { return cmp.Compare(a.ranks[0], b.ranks[0]) })
	members := []member{{os.Getpid(), w.cfg.Ranks}}
	for _, g := range guests {
		members = append(members, member{g.pid, g.ranks})
		mem, err := mapArena(g.arena)
		if err != nil {
			return err
		}
		w.processes = append(w.processes, process{pid: g.pid, ranks: g.ranks, conn: g.conn, mem: mem})
	}
	files := make([][]*os.File, len(guests))
	for i := range guests {
		files[i] = []*os.File{w.control, w.arena.file}
		for j := range guests {
			if j != i {
				files[i] = append(files[i], guests[j].arena)
			}
		}
	}
	var pairs []*os.File
	defer func() {
		for _, f := range pairs {
			f.Close()
		}
		for _, g := range guests {
			g.arena.Close()
		}
	}()
	for i := range guests {
		for j := range i {
			fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return fmt.Errorf("shm: making the sockets between the processes: %w", err)
			}
			a, b := os.NewFile(uintptr(fds[0]), "pair"), os.NewFile(uintptr(fds[1]), "pair")
			pairs = append(pairs, a, b)
			files[i] = append(files[i], a) // for its j-th other guest, in order
			files[j] = append(files[j], b)
		}
	}
	for i, g := range guests {
		if err := w.serve(ctx, g, welcome{Processes: members, You: i + 1}, files[i]); err != nil {
			return fmt.Errorf("shm: process %d (ranks %v) left while the group was made: %w", g.pid, g.ranks, err)
		}
	}
	return nil
}

// serve sends a process all it needs.
func (w *world) serve(ctx context.Context, g *guest, say welcome, files []*os.File) error {
	release := bound(ctx, g.conn)
	err := send(g.conn, say)
	for i := 0; i < len(files) && err == nil; i++ {
		err = sendFile(g.conn, files[i])
	}
	return cmp.Or(err, release())
}

// close ends the reception.
func (p *porch) close() {
	p.stop()
	p.listener.Close()
	p.greeters.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.guests {
		g.conn.Close()
		g.arena.Close()
	}
}

// dial is meet for the processes that do not listen.
func (w *world) dial(ctx context.Context) error {
	conn, err := w.reach(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if len(w.processes) == 0 || w.processes[0].conn != conn {
			conn.Close()
		}
	}()
	release := bound(ctx, conn)
	err = cmp.Or(w.enter(conn), release())
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("shm: waiting for all ranks of %q to come: %w", w.cfg.Name, context.Cause(ctx))
	}
	return err
}

// reach dials until somebody listens.
func (w *world) reach(ctx context.Context) (*net.UnixConn, error) {
	var d net.Dialer
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		conn, err := d.DialContext(ctx, "unix", address(w.cfg.Name).Name)
		if err == nil {
			return conn.(*net.UnixConn), nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("shm: nobody listens for the group %q (the process with rank 0 does; %v): %w", w.cfg.Name, err, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// enter goes through the handshake and takes what the group needs.
func (w *world) enter(conn *net.UnixConn) error {
	pid, err := checkUser(conn)
	if err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	own := w.cfg.hello()
	if err := send(conn, own); err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q, left: %w", pid, w.cfg.Name, err)
	}
	var a answer
	if err := receive(conn, &a); err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q, gave no answer: %w", pid, w.cfg.Name, err)
	}
	if a.Refused != "" {
		return w.refused(pid, a.Refused)
	}
	if len(a.Nonce) != nonceBytes || !hmac.Equal(a.Proof, w.cfg.sign("host", own.Nonce, a.Nonce)) {
		return fmt.Errorf("shm: process %d, which listens for %q, has another token than this process", pid, w.cfg.Name)
	}
	if err := send(conn, proof{w.cfg.sign("guest", a.Nonce, own.Nonce)}); err != nil {
		return err
	}
	if err := sendFile(conn, w.arena.file); err != nil {
		return err
	}
	return w.sit(conn, pid)
}

func (w *world) refused(pid int, why string) error {
	return fmt.Errorf("shm: process %d, which listens for %q, refuses this process (ranks %v): %s", pid, w.cfg.Name, w.cfg.Ranks, why)
}

// sit takes what seat hands over.
func (w *world) sit(conn *net.UnixConn, pid int) error {
	var say welcome
	if err := receive(conn, &say); err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q, ended before the group was complete: %w", pid, w.cfg.Name, err)
	}
	if say.Refused != "" {
		return w.refused(pid, say.Refused)
	}
	if err := say.check(&w.cfg); err != nil {
		return err
	}
	w.me = say.You
	var err error
	if w.control, err = receiveFile(conn); err != nil {
		return err
	}
	if size, err := checkFile(w.control); err != nil || size != tableBytes+int64(layoutOf(w.cfg.Size).bytes)*(1+splitsMax) {
		return fmt.Errorf("shm: process %d handed over a control file of %d bytes: %v", pid, size, err)
	}
	w.processes = make([]process, len(say.Processes))
	for i, m := range say.Processes {
		p := &w.processes[i]
		p.pid, p.ranks = m.Pid, m.Ranks
		if i == 0 {
			p.conn = conn
		}
		if i == w.me {
			continue
		}
		f, err := receiveFile(conn)
		if err != nil {
			return err
		}
		p.mem, err = mapArena(f)
		f.Close()
		if err != nil {
			return err
		}
	}
	for i := range w.processes {
		if i == 0 || i == w.me {
			continue
		}
		f, err := receiveFile(conn)
		if err != nil {
			return err
		}
		c, err := net.FileConn(f)
		f.Close()
		unixConn, ok := c.(*net.UnixConn)
		if err != nil || !ok {
			return fmt.Errorf("shm: process %d handed over no socket: %v", pid, err)
		}
		w.processes[i].conn = unixConn
	}
	return nil
}

// check returns what is wrong with the members of the group.
func (s *welcome) check(c *Config) error {
	seen := make([]bool, c.Size)
	n := 0
	for i, m := range s.Processes {
		if len(m.Ranks) == 0 || checkRanks(m.Ranks, c.Size) != nil || i > 0 && m.Ranks[0] <= s.Processes[i-1].Ranks[0] {
			return fmt.Errorf("shm: process %d is said to have ranks %v", m.Pid, m.Ranks)
		}
		for _, r := range m.Ranks {
			if seen[r] {
				return fmt.Errorf("shm: rank %d is said to be in two processes", r)
			}
			seen[r] = true
			n++
		}
	}
	if n != c.Size || s.You < 1 || s.You >= len(s.Processes) || !slices.Equal(s.Processes[s.You].Ranks, c.Ranks) {
		return fmt.Errorf("shm: the group is said to be %v, and this process, with ranks %v, its number %d", s.Processes, c.Ranks, s.You)
	}
	return nil
}

// mapArena maps another process's arena.
func mapArena(f *os.File) ([]byte, error) {
	size, err := checkFile(f)
	if err != nil {
		return nil, err
	}
	if size < page || int64(int(size)) != size {
		return nil, fmt.Errorf("shm: the other process shares %d bytes", size)
	}
	return mapAligned(f, int(size))
}

// bound ends what the connection waits for when ctx ends, until it is released.
// Released too late, it returns an error, and the connection is of no use.
func bound(ctx context.Context, conn net.Conn) (release func() error) {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	return func() error {
		if !stop() {
			return context.Cause(ctx)
		}
		return nil
	}
}

// checkUser returns the process at the other end, if it is of this user.
func checkUser(conn *net.UnixConn) (pid int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, fmt.Errorf("asking who is at the other end: %w", credErr)
	}
	if int(cred.Uid) != os.Getuid() {
		return 0, fmt.Errorf("process %d belongs to user %d, this process to user %d", cred.Pid, cred.Uid, os.Getuid())
	}
	return int(cred.Pid), nil
}

// send writes a message: its length in 4 bytes, then JSON.
func send(conn net.Conn, message any) error {
	body, err := json.Marshal(message)
	if err != nil {
		return err
	}
	_, err = conn.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...))
	return err
}

// receive reads a message.
func receive(r io.Reader, message any) error {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint32(length[:])
	if n > messageMax {
		return fmt.Errorf("shm: a message of %d bytes, at most %d are expected: the other process speaks another protocol", n, messageMax)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	return json.Unmarshal(body, message)
}

// sendFile hands a file to the process at the other end.
func sendFile(conn *net.UnixConn, f *os.File) error {
	_, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(f.Fd())), nil)
	if err != nil {
		return fmt.Errorf("shm: handing over a file: %w", err)
	}
	return nil
}

// receiveFile takes a file that the process at the other end hands over.
func receiveFile(conn *net.UnixConn) (*os.File, error) {
	var b [1]byte
	rights := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(b[:], rights)
	if err != nil {
		return nil, fmt.Errorf("shm: taking over a file: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("shm: %d control messages, want a file: %v", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("shm: %d files, want one: %v", len(fds), err)
	}
	return os.NewFile(uintptr(fds[0]), "shared"), nil
}
