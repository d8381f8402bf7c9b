package flight

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
)

// Version is the version of the file format: JSON lines. The first line is {"flight": Header}. For each rank
// follow a line {"rank": Rank} and, in their order, one line for each of its calls: {"call": Call}.
const Version = 1

// Bounds of what is read: a worker with the maximum of ranks and communicators writes less.
const (
	fileMax  = 256 << 20 // bytes
	lineMax  = 4 << 20
	ranksMax = 1 << 14
	callsMax = 1 << 12 // of a rank
	textMax  = 4 << 10
	sizeMax  = 1 << 24 // ranks of a communicator
)

// line is a line of a file: exactly one field is set.
type line struct {
	Flight *Header `json:"flight,omitempty"`
	Rank   *Rank   `json:"rank,omitempty"`
	Call   *Call   `json:"call,omitempty"`
}

// Name returns the name of a file: flight-<epoch>-<worker>.jsonl.
func (f *File) Name() string { return fmt.Sprintf("flight-%d-%d.jsonl", f.Epoch, f.Worker) }

// Encode writes a file to w.
func Encode(w io.Writer, f *File) error {
	h := f.Header
	h.Version = Version
	out := json.NewEncoder(w)
	err := out.Encode(line{Flight: &h})
	for i := range f.Ranks {
		r := &f.Ranks[i]
		err = errors.Join(err, out.Encode(line{Rank: r}))
		for j := range r.Calls {
			c := r.Calls[j]
			c.Name, c.Err = truncate(c.Name), truncate(c.Err)
			err = errors.Join(err, out.Encode(line{Call: &c}))
		}
	}
	if err != nil {
		return fmt.Errorf("flight: encoding records: %w", err)
	}
	return nil
}

func truncate(s string) string {
	if len(s) <= textMax {
		return s
	}
	return strings.ToValidUTF8(s[:textMax-len("…")], "") + "…"
}

// Write writes a file into a folder under the name File.Name. It creates the folder if necessary and replaces
// an existing file atomically: a reader sees the old file or the new one, never a part.
func Write(folder string, f *File) error {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fmt.Errorf("flight: folder for records: %w", err)
	}
	temp, err := os.CreateTemp(folder, ".flight-*")
	if err != nil {
		return fmt.Errorf("flight: writing records: %w", err)
	}
	buffered := bufio.NewWriter(temp)
	err = Encode(buffered, f)
	err = errors.Join(err, buffered.Flush(), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), filepath.Join(folder, f.Name()))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("flight: %w", err), os.Remove(temp.Name()))
	}
	return nil
}

// Read returns the files of a folder, ordered by epoch, then by worker. Files that cannot be read are left
// out and named in the error, which is returned together with the others.
func Read(folder string) ([]File, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("flight: %w", err)
	}
	var out []File
	var errs []error
	for _, entry := range entries {
		name := entry.Name()
		if !strings.HasPrefix(name, "flight-") || !strings.HasSuffix(name, ".jsonl") {
			continue
		}
		f, err := readFile(filepath.Join(folder, name))
		if err == nil && f.Name() != name {
			err = fmt.Errorf("it holds the records of %s", f.Name())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("flight: %s: %w", filepath.Join(folder, name), err))
			continue
		}
		out = append(out, *f)
	}
	slices.SortFunc(out, func(a, b File) int {
		if a.Epoch != b.Epoch {
			return int(int64(a.Epoch) - int64(b.Epoch))
		}
		return a.Worker - b.Worker
	})
	return out, errors.Join(errs...)
}

func readFile(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return Decode(f)
}

// Decode reads what [Encode] wrote. It rejects records that no worker can have written. It replaces control
// characters, which could affect a terminal.
func Decode(r io.Reader) (*File, error) {
	in := bufio.NewScanner(io.LimitReader(r, fileMax))
	in.Buffer(nil, lineMax)
	out := &File{}
	number := 0
	for in.Scan() {
		number++
		if err := out.add(in.Bytes(), number == 1); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
	}
	if err := in.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", number+1, err)
	}
	if number == 0 {
		return nil, errors.New("it is empty")
	}
	return out, nil
}

// add parses the next line.
func (f *File) add(text []byte, first bool) error {
	var l line
	dec := json.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&l); err != nil {
		return fmt.Errorf("invalid record: %w", err)
	}
	switch {
	case first && l.Flight == nil:
		return errors.New("not a file of flight records: it does not begin with a header")
	case first:
		f.Header = *l.Flight
		return f.check()
	case l.Rank != nil:
		if len(f.Ranks) == ranksMax {
			return fmt.Errorf("more than %d ranks", ranksMax)
		}
		f.Ranks = append(f.Ranks, *l.Rank)
		return f.Ranks[len(f.Ranks)-1].check()
	case l.Call != nil && len(f.Ranks) == 0:
		return errors.New("a call before the first rank")
	case l.Call != nil:
		r := &f.Ranks[len(f.Ranks)-1]
		if len(r.Calls) == callsMax {
			return fmt.Errorf("more than %d calls of rank %d of %q", callsMax, r.Rank, r.Comm)
		}
		r.Calls = append(r.Calls, *l.Call)
		return r.Calls[len(r.Calls)-1].check(r)
	}
	return errors.New("the line is neither a rank nor a call")
}

func (h *Header) check() error {
	switch {
	case h.Version != Version:
		return fmt.Errorf("version %d of the format: want %d", h.Version, Version)
	case h.Worker < 0 || len(h.Members) > sizeMax:
		return fmt.Errorf("worker %d of %d", h.Worker, len(h.Members))
	}
	for i := range h.Members {
		m := &h.Members[i]
		if m.Worker != i || m.First < 0 || m.Replicas < 0 || m.First > sizeMax || m.Replicas > sizeMax {
			return fmt.Errorf("member %d is worker %d with %d replicas from %d", i, m.Worker, m.Replicas, m.First)
		}
		sanitize(&m.Host)
	}
	sanitize(&h.Job, &h.Why)
	return nil
}

func (r *Rank) check() error {
	if r.Size < 1 || r.Size > sizeMax || r.Rank < 0 || r.Rank >= r.Size || r.World != nil && len(r.World) != r.Size ||
		r.Queued < 0 {
		return fmt.Errorf("rank %d of %d of %q, of which %d are known", r.Rank, r.Size, r.Comm, len(r.World))
	}
	sanitize(&r.Comm, &r.Err)
	return nil
}

func (c *Call) check(r *Rank) error {
	switch c.State {
	case Done, Failed, Running, Waiting:
	default:
		return fmt.Errorf("state %q of a call: want %s, %s, %s or %s", c.State, Done, Failed, Running, Waiting)
	}
	if before := r.collective(len(r.Calls) - 2); !c.Pair && before != nil && before.Seq >= c.Seq {
		return fmt.Errorf("call %d follows call %d", c.Seq, before.Seq)
	}
	for _, peer := range c.WaitsFor {
		if peer < 0 || peer >= r.Size {
			return fmt.Errorf("call %d waits for rank %d of %d", c.Seq, peer, r.Size)
		}
	}
	sanitize(&c.Op, &c.Reduce, &c.DType, &c.Name, &c.Order, &c.Algorithm, &c.Err)
	return nil
}

// sanitize replaces control characters.
func sanitize(texts ...*string) {
	for _, s := range texts {
		*s = strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return ' '
			}
			return r
		}, *s)
	}
}

// collective returns the rank's last collective at or before index i, or nil.
func (r *Rank) collective(i int) *Call {
	for ; i >= 0; i-- {
		if !r.Calls[i].Pair {
			return &r.Calls[i]
		}
	}
	return nil
}
