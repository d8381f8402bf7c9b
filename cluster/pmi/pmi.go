// Package pmi is a client of the key-value space that MPI launchers offer to their processes by PMI-1, "simple PMI":
// MPICH's Hydra (mpiexec), Intel MPI, and Slurm (srun --mpi=pmi2, whose server also accepts PMI-1). By it the processes
// of a job exchange an address, so the job needs no other endpoint.
//
//	kvs, err := pmi.Open(os.LookupEnv)
//	err = kvs.Put("address", "10.0.0.1:4000") // one process
//	err = kvs.Barrier()                       // all
//	address, err := kvs.Get("address")
//
// The protocol is a line of text each way, over a socket that the launcher passes as the file descriptor PMI_FD
// (MPICH's src/pmi/src/pmi_v1.c, Hydra's pmip_pmi_v1.c).
package pmi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// EnvFD is the variable with the number of the socket to the launcher.
const EnvFD = "PMI_FD"

// lineMax bounds a line: Hydra's and Slurm's buffers have 1024 and 2048 bytes.
const lineMax = 4096

// ErrProtocol is matched by errors about an answer that is not of the protocol, or that the launcher refused a command.
var ErrProtocol = errors.New("pmi: unexpected answer from the launcher")

// KVS is one process's connection with its launcher. Its methods must not be called concurrently.
type KVS struct {
	conn   io.ReadWriter
	lines  *bufio.Reader
	space  string // the name of the job's key-value space
	keyMax int
	valMax int
	close  func() error
}

// Open connects with the launcher that started this process. It reads [EnvFD].
func Open(getenv func(string) (string, bool)) (*KVS, error) {
	text, _ := getenv(EnvFD)
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 0 {
		return nil, fmt.Errorf("pmi: %s=%q: want the number of a file descriptor", EnvFD, text)
	}
	conn, err := inherited(fd)
	if err != nil {
		return nil, fmt.Errorf("pmi: %s=%d is not the launcher's socket: %w; a program between the launcher and this "+
			"process may have closed it", EnvFD, fd, err)
	}
	k, err := newKVS(conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	k.close = func() error { return errors.Join(conn.Close(), blocking(fd)) }
	return k, nil
}

// inherited returns the socket that is this file descriptor, which stays open.
func inherited(fd int) (net.Conn, error) {
	again, err := duplicate(fd)
	if err != nil {
		return nil, err
	}
	defer again.Close()
	return net.FileConn(again)
}

// newKVS starts the protocol on a connection.
func newKVS(conn io.ReadWriter) (*KVS, error) {
	k := &KVS{conn: conn, lines: bufio.NewReaderSize(conn, lineMax), close: func() error { return nil }}
	if _, err := k.call("response_to_init", "cmd=init pmi_version=1 pmi_subversion=1"); err != nil {
		return nil, err
	}
	answer, err := k.call("maxes", "cmd=get_maxes")
	if err != nil {
		return nil, err
	}
	for name, most := range map[string]*int{"keylen_max": &k.keyMax, "vallen_max": &k.valMax} {
		if *most, err = strconv.Atoi(answer[name]); err != nil || *most < 1 {
			return nil, fmt.Errorf("%w: %s=%q: want a number from 1", ErrProtocol, name, answer[name])
		}
	}
	if answer, err = k.call("my_kvsname", "cmd=get_my_kvsname"); err != nil {
		return nil, err
	}
	if k.space = answer["kvsname"]; k.space == "" {
		return nil, fmt.Errorf("%w: no name of the key-value space", ErrProtocol)
	}
	return k, nil
}

// Put stores a value, which the other processes can get after a [KVS.Barrier]. A key can be put once. Neither may hold
// spaces or control characters.
func (k *KVS) Put(key, value string) error {
	for text, most := range map[string]int{key: k.keyMax, value: k.valMax} {
		if text == "" || len(text) >= most || strings.ContainsFunc(text, notInValue) { // the launcher adds a zero byte
			return fmt.Errorf("pmi: %q: want 1 to %d bytes without spaces and control characters", clip(text), most-1)
		}
	}
	_, err := k.call("put_result", "cmd=put kvsname="+k.space+" key="+key+" value="+value)
	return err
}

// Get returns the value of a key.
func (k *KVS) Get(key string) (string, error) {
	answer, err := k.call("get_result", "cmd=get kvsname="+k.space+" key="+key)
	if err != nil {
		return "", fmt.Errorf("pmi: key %s: %w", key, err)
	}
	if answer["value"] == "" {
		return "", fmt.Errorf("pmi: key %s: %w: no value", key, ErrProtocol)
	}
	return answer["value"], nil
}

// Barrier waits until all processes of the job have called it.
func (k *KVS) Barrier() error {
	_, err := k.call("barrier_out", "cmd=barrier_in")
	return err
}

// Finalize ends the protocol for this process: afterwards neither it nor an MPI library in it can use the launcher's
// key-value space. Without it, Hydra ends the job when this process ends.
func (k *KVS) Finalize() error {
	_, err := k.call("finalize_ack", "cmd=finalize")
	return errors.Join(err, k.close())
}

// Close closes this connection. The protocol goes on, and an MPI library may start it again.
func (k *KVS) Close() error { return k.close() }

// Bind makes the end of ctx end a call in progress, and every later one, with an error. The caller calls the result
// when it is done.
func (k *KVS) Bind(ctx context.Context) (unbind func()) {
	c, ok := k.conn.(interface{ SetDeadline(time.Time) error })
	if !ok {
		return func() {}
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	return func() { stop() }
}

// call sends a command and returns the fields of its answer.
func (k *KVS) call(want, command string) (map[string]string, error) {
	verb, _, _ := strings.Cut(strings.TrimPrefix(command, "cmd="), " ")
	if _, err := io.WriteString(k.conn, command+"\n"); err != nil {
		return nil, fmt.Errorf("pmi: %s: %w", verb, err)
	}
	line, err := k.lines.ReadSlice('\n')
	if err != nil {
		return nil, fmt.Errorf("pmi: %s: reading the launcher's answer: %w", verb, err)
	}
	fields, err := parse(string(line[:len(line)-1]))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w to %s: %w", ErrProtocol, verb, err)
	case fields["cmd"] != want:
		return nil, fmt.Errorf("%w to %s: %q, want %s", ErrProtocol, verb, clip(string(line)), want)
	case fields["rc"] != "" && fields["rc"] != "0":
		return nil, fmt.Errorf("%w to %s: refused: rc=%s %s", ErrProtocol, verb, fields["rc"], fields["msg"])
	}
	return fields, nil
}

// parse decodes a line of the protocol: NAME=VALUE, separated by one space or more, the first of which is cmd.
func parse(line string) (map[string]string, error) {
	fields := map[string]string{}
	for i, word := range strings.FieldsFunc(line, func(c rune) bool { return c == ' ' }) {
		name, value, ok := strings.Cut(word, "=")
		switch {
		case !ok || name == "" || strings.ContainsFunc(name, notInName):
			return nil, fmt.Errorf("%q: want NAME=VALUE", clip(word))
		case i == 0 && name != "cmd":
			return nil, fmt.Errorf("%q: want cmd=… first", clip(word))
		case strings.ContainsFunc(value, notInValue):
			return nil, fmt.Errorf("%q: want no control characters", clip(word))
		}
		if _, twice := fields[name]; twice {
			return nil, fmt.Errorf("%s is given twice", name)
		}
		fields[name] = value
	}
	if len(fields) == 0 {
		return nil, errors.New("an empty line")
	}
	return fields, nil
}

func notInName(c rune) bool { return (c < 'a' || c > 'z') && c != '_' }

func notInValue(c rune) bool { return c <= ' ' || c == 0x7f }

// clip shortens a text for an error.
func clip(s string) string {
	if len(s) > 100 {
		return s[:100] + "…"
	}
	return s
}
