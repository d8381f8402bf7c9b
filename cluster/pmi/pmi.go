// Package pmi is a client of the key-value space that MPI launchers offer to their processes by PMI-1, "simple PMI":
// MPICH's Hydra (mpiexec), Intel MPI, and Slurm (srun --mpi=pmi2, whose server also accepts PMI-1). The processes of a
// job exchange an address through it, so the job needs no other endpoint.
//
//	kvs, err := pmi.Open(ctx, os.LookupEnv)
//	err = kvs.Put(ctx, "address", "10.0.0.1:4000") // one process
//	err = kvs.Barrier(ctx)                         // all
//	address, err := kvs.Get(ctx, "address")
//	err = kvs.Finalize(ctx)
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

// KVS is one process's connection to its launcher. Its methods must not be called concurrently. A call ends with the
// cause of its context when that ends; afterwards only Close may be called.
type KVS struct {
	conn   net.Conn
	lines  *bufio.Reader
	space  string // the name of the job's key-value space
	keyMax int
	valMax int
	close  func() error
}

// Open connects to the launcher that started this process. It reads [EnvFD].
func Open(ctx context.Context, getenv func(string) (string, bool)) (*KVS, error) {
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
	k := &KVS{
		conn: conn, lines: bufio.NewReaderSize(conn, lineMax),
		close: func() error { return errors.Join(conn.Close(), blocking(fd)) },
	}
	if err := k.start(ctx); err != nil {
		return nil, errors.Join(err, k.close())
	}
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

// start starts the protocol.
func (k *KVS) start(ctx context.Context) error {
	switch _, err := k.call(ctx, "response_to_init", "cmd=init pmi_version=1 pmi_subversion=1"); {
	case err != nil && ctx.Err() == nil && !errors.Is(err, ErrProtocol): // the launcher has closed the connection
		return fmt.Errorf("%w; an earlier program of this task may have finalized the key-value space: start each job by a "+
			"separate mpiexec or srun", err)
	case err != nil:
		return err
	}
	answer, err := k.call(ctx, "maxes", "cmd=get_maxes")
	if err != nil {
		return err
	}
	for name, most := range map[string]*int{"keylen_max": &k.keyMax, "vallen_max": &k.valMax} {
		if *most, err = strconv.Atoi(answer[name]); err != nil || *most < 2 {
			return fmt.Errorf("%w: %s=%q: want a number from 2", ErrProtocol, name, clip(answer[name]))
		}
	}
	if answer, err = k.call(ctx, "my_kvsname", "cmd=get_my_kvsname"); err != nil {
		return err
	}
	if k.space = answer["kvsname"]; k.space == "" {
		return fmt.Errorf("%w: no name of the key-value space", ErrProtocol)
	}
	return nil
}

// Put stores a value, which the other processes can get after a [KVS.Barrier]. A key can be put once. Neither may hold
// spaces or control characters.
func (k *KVS) Put(ctx context.Context, key, value string) error {
	for text, most := range map[string]int{key: k.keyMax, value: k.valMax} {
		if text == "" || len(text) >= most || strings.ContainsFunc(text, notInValue) { // the launcher adds a zero byte
			return fmt.Errorf("pmi: %q: want 1 to %d bytes without spaces and control characters", clip(text), most-1)
		}
	}
	_, err := k.call(ctx, "put_result", "cmd=put kvsname="+k.space+" key="+key+" value="+value)
	return err
}

// Get returns the value of a key.
func (k *KVS) Get(ctx context.Context, key string) (string, error) {
	answer, err := k.call(ctx, "get_result", "cmd=get kvsname="+k.space+" key="+key)
	if err != nil {
		return "", fmt.Errorf("pmi: key %s: %w", key, err)
	}
	if answer["value"] == "" {
		return "", fmt.Errorf("pmi: key %s: %w: no value", key, ErrProtocol)
	}
	return answer["value"], nil
}

// Barrier waits until all processes of the job have called it.
func (k *KVS) Barrier(ctx context.Context) error {
	_, err := k.call(ctx, "barrier_out", "cmd=barrier_in")
	return err
}

// Finalize ends the protocol for this process: afterwards neither it nor an MPI library in it can use the launcher's
// key-value space. Without it, Hydra ends the job when this process ends.
func (k *KVS) Finalize(ctx context.Context) error {
	_, err := k.call(ctx, "finalize_ack", "cmd=finalize")
	return errors.Join(err, k.close())
}

// Close closes this connection. The protocol goes on, and an MPI library may start it again.
func (k *KVS) Close() error { return k.close() }

// call sends a command and returns the fields of its answer.
func (k *KVS) call(ctx context.Context, want, command string) (map[string]string, error) {
	verb, _, _ := strings.Cut(strings.TrimPrefix(command, "cmd="), " ")
	stop := context.AfterFunc(ctx, func() { _ = k.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := io.WriteString(k.conn, command+"\n")
	var line []byte
	if err == nil {
		line, err = k.lines.ReadSlice('\n')
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, fmt.Errorf("pmi: %s: the launcher has not answered: %w", verb, context.Cause(ctx))
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, fmt.Errorf("%w to %s: %q, want a line of less than %d bytes", ErrProtocol, verb, clip(string(line)),
			lineMax)
	case err != nil:
		return nil, fmt.Errorf("pmi: %s: connection to the launcher: %w", verb, err)
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
