package failure

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// recordMax bounds a record's file, in bytes: a stack is long, but bounded.
const recordMax = 4 << 20

// Name returns the file name of a record: failure-<epoch>-<worker>.json.
func (r *Record) Name() string { return fmt.Sprintf("failure-%d-%d.json", r.Epoch, r.Worker) }

// Write writes a record into a folder under [Record.Name]. It creates the folder if necessary, and replaces
// an existing record atomically: a reader sees the old record or the new one, never a partial one.
func Write(folder string, r *Record) error {
	text, err := Encode(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fmt.Errorf("failure: folder for records: %w", err)
	}
	f, err := os.CreateTemp(folder, ".failure-*")
	if err != nil {
		return fmt.Errorf("failure: writing a record: %w", err)
	}
	_, err = f.Write(append(text, '\n'))
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(folder, r.Name()))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("failure: writing a record: %w", err), os.Remove(f.Name()))
	}
	return nil
}

// Read returns the records of one epoch in a folder, by worker. Invalid files are skipped and named in the
// error, which is returned together with the valid records. A folder that does not exist holds no records.
func Read(folder string, epoch uint32) ([]Record, error) {
	names, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("failure: reading records: %w", err)
	}
	prefix := fmt.Sprintf("failure-%d-", epoch)
	var out []Record
	var errs []error
	for _, entry := range names {
		if !strings.HasPrefix(entry.Name(), prefix) || !strings.HasSuffix(entry.Name(), ".json") {
			continue
		}
		r, err := readFile(filepath.Join(folder, entry.Name()))
		if err == nil && r.Name() != entry.Name() {
			err = fmt.Errorf("it has the content of %s", r.Name())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("failure: %s: %w", filepath.Join(folder, entry.Name()), err))
			continue
		}
		out = append(out, *r)
	}
	slices.SortFunc(out, func(a, b Record) int { return a.Worker - b.Worker })
	return out, errors.Join(errs...)
}

func readFile(path string) (*Record, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, recordMax+1))
	if err != nil {
		return nil, err
	}
	return Decode(text)
}

// Encode returns a record as JSON. A stack that is too long is truncated.
func Encode(r *Record) ([]byte, error) {
	short := *r
	short.Message, short.Stack = cut(r.Message), cut(r.Stack)
	text, err := json.Marshal(&short)
	if err != nil {
		return nil, fmt.Errorf("failure: encoding a record: %w", err)
	}
	return text, nil
}

// cut truncates a text so that the record stays far below recordMax even after JSON escaping.
func cut(s string) string {
	const textMax, mark = 256 << 10, "\n… cut off"
	if len(s) <= textMax {
		return s
	}
	return strings.ToValidUTF8(s[:textMax], "") + mark
}

// Decode parses the output of [Encode]. It rejects records that no worker can have written.
func Decode(text []byte) (*Record, error) {
	if len(text) > recordMax {
		return nil, fmt.Errorf("failure: a record of %d bytes: want at most %d", len(text), recordMax)
	}
	r := &Record{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("failure: invalid record: %w", err)
	}
	if r.Worker < 0 || r.Kind == "" {
		return nil, fmt.Errorf("failure: a record of worker %d, of kind %q: want a worker from 0 and a kind", r.Worker,
			r.Kind)
	}
	return r, nil
}
