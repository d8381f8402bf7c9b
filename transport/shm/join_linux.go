package shm

import (
	"cmp"
	"context"
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
const protocolVersion = 5

// hello is the first message of a dialing process.
type hello struct {
	Protocol string
	Version  int
	Arch     string
	Job      string
	Epoch    uint32
	Group    uint64
	Size     int
	Ranks    []int
	Proof    bool // Config.Authenticate follows
}

// helloReply replies to a hello: a refusal or "". Then follow Config.Authenticate, the control file, and the arena and
// the bell of the dialing process, which holds its lock on the control file from then on.
type helloReply struct{ Refused string }

// joinReply ends the handshake: a refusal, or the members of the group, by process number. Then follow the arenas
// and bells of all other processes.
type joinReply struct {
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
	helloTime    = 5 * time.Second // bounds the handshake
	lockTime     = helloTime / 50  // bounds the wait for a lock in it
)

// HostID returns a text that is equal in two processes if they can share memory: they have the same boot of a kernel,
// network namespace, user namespace, user and architecture. It returns "" if this process cannot share memory.
func HostID() string {
	f, err := newFile("lockstep-probe", 1)
	if err != nil {
		return ""
	}
	_, err = isLocked(f, 0)
	f.Close()
	if err != nil {
		return "" // a sandbox such as gVisor: watch needs these locks
	}
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

// address returns the abstract socket of a group. Its name disappears when the socket is closed.
func address(name string) *net.UnixAddr {
	sum := sha256.Sum256([]byte(name))
	return &net.UnixAddr{Net: "unix", Name: "@lockstep-" + hex.EncodeToString(sum[:16])}
}

// join connects the processes of the group and shares the files.
func join(ctx context.Context, cfg Config) (*world, error) {
	w := &world{cfg: cfg, over: make(chan struct{}), leaderless: make(chan struct{})}
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
	if err = w.newBell(); err != nil {
		w.abandon()
		return nil, err
	}
	if cfg.Ranks[0] == 0 {
		err = w.listen(ctx)
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

// abandon releases the resources of a failed Open.
func (w *world) abandon() {
	if w.control == nil {
		w.control = os.NewFile(^uintptr(0), "")
	}
	w.close()
}

// hello returns the hello of this process.
func (c *Config) hello() hello {
	return hello{
		Protocol: protocolName, Version: protocolVersion, Arch: runtime.GOARCH,
		Job: c.Job, Epoch: c.Epoch, Group: c.Group, Size: c.Size, Ranks: c.Ranks, Proof: c.Authenticate != nil,
	}
}

// differ returns how another process's hello conflicts with this one's, or "".
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
	if h.Proof != from.Proof {
		return "one of the two processes has a secret, the other has none"
	}
	if len(from.Ranks) == 0 || checkRanks(from.Ranks, h.Size) != nil {
		return fmt.Sprintf("it claims the ranks %v of %d", from.Ranks, h.Size)
	}
	return ""
}

func quoted(v any) any {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return v
}

// rendezvous is the join on the listening side.
type rendezvous struct {
	cfg      *Config
	own      hello
	control  *os.File
	listener *net.UnixListener
	stop     context.CancelFunc
	work     sync.WaitGroup
	changed  chan struct{} // a token: a process was admitted or refused

	mu      sync.Mutex
	joiners []*joiner
	all     bool   // all ranks have joined
	refused string // the last refusal
}

// joiner is an admitted process.
type joiner struct {
	conn  *net.UnixConn
	pid   int
	ranks []int
	arena *os.File
	bell  int
}

func (j *joiner) close() {
	j.conn.Close()
	j.arena.Close()
	if j.bell != noBell {
		unix.Close(j.bell)
		j.bell = noBell
	}
}

// listen is join for the listening process.
func (w *world) listen(ctx context.Context) error {
	control, err := newFile("lockstep-control", tableBytes+int64(layoutOf(w.cfg.Size).bytes)*(1+splitsMax))
	if err != nil {
		return err
	}
	w.control = control
	if err := w.lock(); err != nil {
		return err
	}
	w.processes = []process{{pid: os.Getpid(), ranks: w.cfg.Ranks, bell: noBell}}
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
	ctxWork, stop := context.WithCancel(context.Background())
	p := &rendezvous{
		cfg: &w.cfg, own: w.cfg.hello(), control: control, listener: l, stop: stop, changed: make(chan struct{}, 1),
	}
	w.rendezvous = p
	p.work.Go(func() { p.accept(ctxWork) })
	for !p.complete() {
		select {
		case <-p.changed:
		case <-ctx.Done():
			return p.missing(ctx)
		}
	}
	return w.distribute(ctx, p)
}

// accept performs the handshakes of the dialing processes, until the listener is closed.
func (p *rendezvous) accept(ctx context.Context) {
	for {
		conn, err := p.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // probably out of file descriptors
			select {
			case <-ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
				continue
			}
		}
		p.work.Go(func() {
			limited, cancel := context.WithTimeout(ctx, helloTime)
			defer cancel()
			err := p.handshake(limited, conn)
			if err != nil {
				conn.Close()
			}
			p.mu.Lock()
			if err != nil {
				p.refused = err.Error()
			}
			p.mu.Unlock()
			select {
			case p.changed <- struct{}{}:
			default:
			}
		})
	}
}

// handshake admits a process, or refuses it with a reason.
func (p *rendezvous) handshake(ctx context.Context, conn *net.UnixConn) error {
	release := bound(ctx, conn)
	pid, err := checkUser(conn)
	if err != nil {
		return err
	}
	var h hello
	raw, err := receive(conn, &h)
	if err != nil {
		return fmt.Errorf("process %d sent no hello: %w", pid, err)
	}
	if why := p.own.differ(&h); why != "" {
		send(conn, helloReply{why})
		return fmt.Errorf("process %d was refused: %s", pid, why)
	}
	if _, err := send(conn, helloReply{}); err != nil {
		return fmt.Errorf("process %d closed the connection: %w", pid, err)
	}
	if err := p.cfg.authenticate(conn, false, raw); err != nil {
		return fmt.Errorf("process %d was refused: %w", pid, err)
	}
	if err := sendFiles(ctx, conn, []int{int(p.control.Fd())}); err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	j := &joiner{conn: conn, pid: pid, ranks: h.Ranks}
	files, err := receiveFiles(conn, 2)
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	j.arena, j.bell = os.NewFile(uintptr(files[0]), "arena"), files[1]
	if err := checkBell(j.bell); err != nil {
		j.close()
		return fmt.Errorf("process %d: %w", pid, err)
	}
	if err := release(); err != nil {
		j.close()
		return fmt.Errorf("handshake with process %d timed out: %w", pid, err)
	}
	if why := p.admit(j); why != "" {
		send(conn, joinReply{Refused: why})
		j.close()
		return fmt.Errorf("process %d was refused: %s", pid, why)
	}
	return nil
}

// admit adds a process, unless one of its ranks is taken. It returns the refusal or "".
func (p *rendezvous) admit(j *joiner) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.joiners = slices.DeleteFunc(p.joiners, func(other *joiner) bool {
		if !p.all && other.left() {
			other.close()
			return true
		}
		return false
	})
	taken := append(p.joiners[:len(p.joiners):len(p.joiners)], &joiner{pid: os.Getpid(), ranks: p.cfg.Ranks})
	for _, other := range taken {
		for _, r := range j.ranks {
			if slices.Contains(other.ranks, r) {
				return fmt.Sprintf("rank %d is taken by process %d", r, other.pid)
			}
		}
	}
	p.joiners = append(p.joiners, j)
	return ""
}

// left reports whether the other end has closed the connection.
func (j *joiner) left() bool {
	raw, err := j.conn.SyscallConn()
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

// complete reports whether all ranks have joined.
func (p *rendezvous) complete() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.cfg.Ranks)
	for _, j := range p.joiners {
		n += len(j.ranks)
	}
	p.all = n == p.cfg.Size
	return p.all
}

// missing returns the error of a rendezvous that timed out; it names the missing ranks.
func (p *rendezvous) missing(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	present := slices.Clone(p.cfg.Ranks)
	for _, j := range p.joiners {
		present = append(present, j.ranks...)
	}
	var absent []int
	for r := range p.cfg.Size {
		if !slices.Contains(present, r) {
			absent = append(absent, r)
		}
	}
	text := ""
	if p.refused != "" {
		text = " (" + p.refused + ")"
	}
	return fmt.Errorf("shm: waiting for ranks %v of %q%s: %w", absent, p.cfg.Name, text, context.Cause(ctx))
}

// distribute sends every process its join reply and files.
func (w *world) distribute(ctx context.Context, p *rendezvous) error {
	p.mu.Lock()
	joiners := slices.Clone(p.joiners)
	p.mu.Unlock()
	slices.SortFunc(joiners, func(a, b *joiner) int { return cmp.Compare(a.ranks[0], b.ranks[0]) })
	members := []member{{os.Getpid(), w.cfg.Ranks}}
	for _, j := range joiners {
		members = append(members, member{j.pid, j.ranks})
		mem, err := mapArena(j.arena)
		if err != nil {
			return err
		}
		w.processes = append(w.processes, process{pid: j.pid, ranks: j.ranks, conn: j.conn, mem: mem, bell: j.bell})
		j.bell = noBell
	}
	defer func() {
		for _, j := range joiners {
			j.arena.Close()
		}
	}()
	files := make([]int, 0, 2*len(joiners))
	for i, j := range joiners {
		files = append(files[:0], int(w.arena.file.Fd()), w.bellFD)
		for k := range joiners {
			if k != i {
				files = append(files, int(joiners[k].arena.Fd()), w.processes[k+1].bell)
			}
		}
		if err := w.serve(ctx, j, joinReply{Processes: members, You: i + 1}, files); err != nil {
			return fmt.Errorf("shm: process %d (ranks %v) closed the connection while the group was opened: %w", j.pid, j.ranks,
				err)
		}
	}
	return nil
}

// serve sends a process its join reply and files.
func (w *world) serve(ctx context.Context, j *joiner, message joinReply, files []int) error {
	release := bound(ctx, j.conn)
	_, err := send(j.conn, message)
	if err == nil {
		err = sendFiles(ctx, j.conn, files)
	}
	return cmp.Or(err, release())
}

// close stops listening and closes the connections.
func (p *rendezvous) close() {
	p.stop()
	p.listener.Close()
	p.work.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, j := range p.joiners {
		j.close()
	}
}

// dial is join for the processes that do not listen.
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
	err = cmp.Or(w.enter(ctx, conn), release())
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("shm: waiting for all ranks of %q to join: %w", w.cfg.Name, context.Cause(ctx))
	}
	return err
}

// reach dials until a process listens.
func (w *world) reach(ctx context.Context) (*net.UnixConn, error) {
	var d net.Dialer
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		conn, err := d.DialContext(ctx, "unix", address(w.cfg.Name).Name)
		if err == nil {
			return conn.(*net.UnixConn), nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("shm: the process with rank 0 does not listen for the group %q (%v): %w", w.cfg.Name, err,
				context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// enter performs the handshake and receives the files of the group.
func (w *world) enter(ctx context.Context, conn *net.UnixConn) error {
	pid, err := checkUser(conn)
	if err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	hello, err := send(conn, w.cfg.hello())
	if err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q, closed the connection: %w", pid, w.cfg.Name, err)
	}
	var reply helloReply
	if _, err := receive(conn, &reply); err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q, did not answer: %w", pid, w.cfg.Name, err)
	}
	if reply.Refused != "" {
		return w.refused(pid, reply.Refused)
	}
	if err := w.cfg.authenticate(conn, true, hello); err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q: %w", pid, w.cfg.Name, err)
	}
	if err := w.receiveControl(conn, pid); err != nil {
		return err
	}
	// Another process that holds the lock has taken the ranks, and this one will be refused, or it is ending: the system
	// closes its connection and its lock one after the other.
	if err := w.lockWithin(lockTime); err != nil && !errors.Is(err, unix.EAGAIN) {
		return err
	}
	if err := sendFiles(ctx, conn, []int{int(w.arena.file.Fd()), w.bellFD}); err != nil {
		return err
	}
	return w.receiveGroup(conn, pid)
}

// authenticate calls Config.Authenticate.
func (c *Config) authenticate(conn net.Conn, dialed bool, hello []byte) error {
	if c.Authenticate == nil {
		return nil
	}
	if err := c.Authenticate(conn, dialed, hello); err != nil {
		return fmt.Errorf("authentication: %w", err)
	}
	return nil
}

func (w *world) refused(pid int, why string) error {
	return fmt.Errorf("shm: process %d, which listens for %q, refuses this process (ranks %v): %s", pid, w.cfg.Name,
		w.cfg.Ranks, why)
}

// receiveControl receives the control file.
func (w *world) receiveControl(conn *net.UnixConn, pid int) error {
	files, err := receiveFiles(conn, 1)
	if err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q: %w", pid, w.cfg.Name, err)
	}
	w.control = os.NewFile(uintptr(files[0]), "control")
	if size, err := checkFile(w.control); err != nil ||
		size != tableBytes+int64(layoutOf(w.cfg.Size).bytes)*(1+splitsMax) {
		return fmt.Errorf("shm: process %d sent a control file of %d bytes: %v", pid, size, err)
	}
	return nil
}

// receiveGroup receives the messages and files that distribute sends.
func (w *world) receiveGroup(conn *net.UnixConn, pid int) error {
	var message joinReply
	if _, err := receive(conn, &message); err != nil {
		return fmt.Errorf("shm: process %d, which listens for %q, ended before the group was complete: %w", pid, w.cfg.Name,
			err)
	}
	if message.Refused != "" {
		return w.refused(pid, message.Refused)
	}
	if err := message.check(&w.cfg); err != nil {
		return err
	}
	w.me = message.You
	files := receiver{conn: conn, left: 2 * (len(message.Processes) - 1)}
	defer files.close()
	w.processes = make([]process, len(message.Processes))
	for i := range w.processes {
		w.processes[i].bell = noBell // none of them is received yet
	}
	for i, m := range message.Processes {
		p := &w.processes[i]
		p.pid, p.ranks = m.Pid, m.Ranks
		if i == 0 {
			p.conn = conn
		}
		if i == w.me {
			continue
		}
		fd, err := files.next()
		if err != nil {
			return err
		}
		arena := os.NewFile(uintptr(fd), "arena")
		p.mem, err = mapArena(arena)
		arena.Close()
		if err != nil {
			return err
		}
		bell, err := files.next()
		if err != nil {
			return err
		}
		p.bell = bell
		if err := checkBell(bell); err != nil {
			return err
		}
	}
	return nil
}

// receiver receives files one after the other.
type receiver struct {
	conn  *net.UnixConn
	left  int   // not received yet
	files []int // received, and not used yet
}

func (r *receiver) next() (int, error) {
	if len(r.files) == 0 {
		n := min(r.left, filesMax)
		var err error
		if r.files, err = receiveFiles(r.conn, n); err != nil {
			return 0, err
		}
		r.left -= n
	}
	f := r.files[0]
	r.files = r.files[1:]
	return f, nil
}

// close closes the files that were received and not used.
func (r *receiver) close() { closeFiles(r.files) }

// check returns an error if the members of the group are invalid.
func (s *joinReply) check(c *Config) error {
	seen := make([]bool, c.Size)
	n := 0
	for i, m := range s.Processes {
		if len(m.Ranks) == 0 || checkRanks(m.Ranks, c.Size) != nil || i > 0 && m.Ranks[0] <= s.Processes[i-1].Ranks[0] {
			return fmt.Errorf("shm: invalid join reply: process %d has ranks %v", m.Pid, m.Ranks)
		}
		for _, r := range m.Ranks {
			if seen[r] {
				return fmt.Errorf("shm: invalid join reply: rank %d is in two processes", r)
			}
			seen[r] = true
			n++
		}
	}
	if n != c.Size || s.You < 1 || s.You >= len(s.Processes) || !slices.Equal(s.Processes[s.You].Ranks, c.Ranks) {
		return fmt.Errorf("shm: invalid join reply: the group is %v, and this process, with ranks %v, has number %d",
			s.Processes, c.Ranks, s.You)
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
		return nil, fmt.Errorf("shm: the other process sent an arena of %d bytes", size)
	}
	return mapAligned(f, int(size))
}

// bound makes the end of ctx interrupt the operations of a connection, until release is called. If ctx has ended
// before, release returns an error, and the connection is unusable.
func bound(ctx context.Context, conn net.Conn) (release func() error) {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	return func() error {
		if !stop() {
			return context.Cause(ctx)
		}
		return nil
	}
}

// checkUser returns the process at the other end, or an error if it belongs to another user.
func checkUser(conn *net.UnixConn) (pid int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, fmt.Errorf("identifying the process at the other end: %w", credErr)
	}
	if int(cred.Uid) != os.Getuid() {
		return 0, fmt.Errorf("process %d belongs to user %d, this process to user %d", cred.Pid, cred.Uid, os.Getuid())
	}
	return int(cred.Pid), nil
}

// send writes a message, its length in 4 bytes, then JSON, and returns the JSON.
func send(conn net.Conn, message any) (body []byte, err error) {
	if body, err = json.Marshal(message); err != nil {
		return nil, err
	}
	_, err = conn.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...))
	return body, err
}

// receive reads a message, and returns its JSON.
func receive(r io.Reader, message any) (body []byte, err error) {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(length[:])
	if n > messageMax {
		return nil, fmt.Errorf("shm: got a message of %d bytes, want at most %d: the other process uses another protocol", n,
			messageMax)
	}
	body = make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	return body, json.Unmarshal(body, message)
}

// filesMax bounds the files of a message. Linux passes at most 253.
const filesMax = 250

// sendFiles passes files to the process at the other end, filesMax in a message. Linux bounds the files that the
// processes of a user have sent and not received yet by the limit of a process's descriptors; sendFiles waits while
// that is reached.
func sendFiles(ctx context.Context, conn *net.UnixConn, files []int) error {
	for len(files) > 0 {
		n := min(len(files), filesMax)
		_, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(files[:n]...), nil)
		if errors.Is(err, unix.ETOOMANYREFS) && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
			continue
		}
		if err != nil {
			return fmt.Errorf("shm: sending file descriptors: %w", err)
		}
		files = files[n:]
	}
	return nil
}

// receiveFiles receives the n files of a message from the process at the other end.
func receiveFiles(conn *net.UnixConn, n int) ([]int, error) {
	var b [1]byte
	rights := make([]byte, unix.CmsgSpace(4*n))
	_, length, flags, _, err := conn.ReadMsgUnix(b[:], rights)
	if err != nil {
		return nil, fmt.Errorf("shm: receiving file descriptors: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(rights[:length])
	if err != nil {
		return nil, fmt.Errorf("shm: receiving file descriptors: %w", err)
	}
	var files []int
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			closeFiles(files)
			return nil, fmt.Errorf("shm: receiving file descriptors: %w", err)
		}
		files = append(files, fds...)
	}
	if len(files) != n {
		closeFiles(files)
		hint := ""
		if flags&unix.MSG_CTRUNC != 0 {
			hint = "; is the limit of open files too low (ulimit -n)?"
		}
		return nil, fmt.Errorf("shm: received %d file descriptors, want %d%s", len(files), n, hint)
	}
	return files, nil
}

func closeFiles(files []int) {
	for _, fd := range files {
		unix.Close(fd)
	}
}
