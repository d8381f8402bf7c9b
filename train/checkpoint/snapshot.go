package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Contents is the contents of a snapshot.
type Contents struct {
	Step    int64           // training step, part of the snapshot's name
	State   json.RawMessage // the program's state besides tensors
	Tensors []Tensor        // with unique names
}

// Snapshot is a snapshot that was read from disk.
type Snapshot struct {
	Contents

	Path    string    // its folder
	Written time.Time // by the writer's clock
}

// The files of a snapshot.
const (
	tensorsFile  = "state.safetensors"
	manifestFile = "manifest.json"
	sumsFile     = "SHA256SUMS" // of the others, as sha256sum writes and checks it
)

// The format and version in manifest.json. Readers reject a higher version. Snapshots without further parts are of
// version 1.
const (
	formatName    = "lockstep snapshot"
	formatVersion = 2
)

// Limits for reading files that are not verified yet.
const (
	manifestBytesMax = 256 << 20
	sumsBytesMax     = 4 << 20
)

// manifest is the contents of manifest.json.
type manifest struct {
	Format  string          `json:"format"`
	Version int             `json:"version"`
	Step    int64           `json:"step"`
	Written time.Time       `json:"written"`
	Bytes   int64           `json:"bytes"`           // of the tensors' file
	Parts   []Part          `json:"parts,omitempty"` // the files of the other tensors
	State   json.RawMessage `json:"state"`
}

// Part is a file of tensors of a snapshot that several processes write.
type Part struct {
	File   string `json:"file"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"` // in hexadecimal
}

var partPattern = regexp.MustCompile(`^state-[0-9]{5}\.safetensors$`)

// partFile returns the name of the file of part i. Part 0 is the file of a snapshot that one process writes.
func partFile(i int) string {
	if i == 0 {
		return tensorsFile
	}
	return fmt.Sprintf("state-%05d.safetensors", i)
}

// WritePart writes part i of the snapshot in the folder that [Manager.Begin] returned, and syncs it. Another process
// may have begun the snapshot.
func WritePart(folder string, i int, tensors []Tensor) (Part, error) {
	return disk{}.writePart(folder, i, tensors)
}

func (d disk) writePart(folder string, i int, tensors []Tensor) (Part, error) {
	sum, size, err := d.writeSummed(filepath.Join(folder, partFile(i)),
		func(w io.Writer) error { return Write(w, tensors, nil) })
	return Part{partFile(i), size, sum}, err
}

// name is the name of a snapshot's folder. Numbers increase with every save in one folder, whatever the steps
// are.
type name struct {
	number int
	step   int64
}

const namePrefix = "snapshot-"

var namePattern = regexp.MustCompile(`^` + namePrefix + `([0-9]{6,9})-step-([0-9]{1,18})$`)

func (n name) String() string { return fmt.Sprintf("%s%06d-step-%d", namePrefix, n.number, n.step) }

func parseName(text string) (n name, ok bool) {
	m := namePattern.FindStringSubmatch(text)
	if m == nil {
		return n, false
	}
	n.number, _ = strconv.Atoi(m[1])
	n.step, _ = strconv.ParseInt(m[2], 10, 64)
	return n, n.String() == text
}

// writeSnapshot writes the files of a snapshot into the folder dir, and syncs them.
func (d disk) writeSnapshot(dir string, c *Contents) error {
	part, err := d.writePart(dir, 0, c.Tensors)
	if err != nil {
		return err
	}
	return d.writeManifest(dir, c, []Part{part})
}

// writeManifest completes a snapshot, whose parts are written.
func (d disk) writeManifest(dir string, c *Contents, parts []Part) error {
	m := manifest{
		Format: formatName, Version: 1, Step: c.Step, Written: time.Now().UTC().Truncate(time.Millisecond),
		Bytes: parts[0].Bytes, Parts: parts[1:], State: c.State,
	}
	if len(m.Parts) > 0 {
		m.Version = formatVersion
	}
	if m.State == nil {
		m.State = json.RawMessage("null")
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("checkpoint: the state is not JSON: %w", err)
	}
	said, _, err := d.writeSummed(filepath.Join(dir, manifestFile), writeAll(append(text, '\n')))
	if err != nil {
		return err
	}
	all := append(sums(said, parts[0].SHA256), partSums(m.Parts)...)
	if _, _, err = d.writeSummed(filepath.Join(dir, sumsFile), writeAll(all)); err != nil {
		return err
	}
	return d.syncFolder(dir)
}

func writeAll(text []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	}
}

// writeSummed writes a new file, syncs it, and returns its SHA-256 and its size.
func (d disk) writeSummed(path string, write func(io.Writer) error) (sum string, size int64, err error) {
	if err := d.does("create", path); err != nil {
		return "", 0, wrap(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return "", 0, wrap(err)
	}
	count := &summed{hash: sha256.New()}
	err = fill(f, func(w io.Writer) error { return write(io.MultiWriter(d.watched(w, path), count)) }, func() error {
		if err := d.does("sync", path); err != nil {
			return err
		}
		return f.Sync()
	})
	return hex.EncodeToString(count.hash.Sum(nil)), count.size, err
}

// summed is a writer that records the hash and the length of the data.
type summed struct {
	hash hash.Hash
	size int64
}

func (s *summed) Write(p []byte) (int, error) {
	s.size += int64(len(p))
	return s.hash.Write(p)
}

// sums returns the text of SHA256SUMS.
func sums(manifest, tensors string) []byte {
	return fmt.Appendf(nil, "%s  %s\n%s  %s\n", manifest, manifestFile, tensors, tensorsFile)
}

// partSums returns the lines of SHA256SUMS that follow those of sums.
func partSums(parts []Part) (text []byte) {
	for _, p := range parts {
		text = fmt.Appendf(text, "%s  %s\n", p.SHA256, p.File)
	}
	return text
}

// Reader reads snapshots. Its zero value works.
type Reader struct {
	// Progress, if not nil, is called whenever another mebibyte, or less at the end of a tensor or file, has been read,
	// by the goroutine that reads: twice for each, since files are verified before they are decoded.
	Progress func()
}

// ReadSnapshot is [Reader.ReadSnapshot] of a zero Reader.
func ReadSnapshot(path string) (*Snapshot, error) { return Reader{}.ReadSnapshot(path) }

// ReadSnapshot reads the snapshot in the folder path. Every byte is verified against a checksum. If a byte
// has changed or is missing, or the folder is not a snapshot, the error names the file.
func (r Reader) ReadSnapshot(path string) (*Snapshot, error) {
	s, err := r.readSnapshot(path)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: the snapshot %s is refused: %w", path, err)
	}
	return s, nil
}

func (r Reader) readSnapshot(path string) (*Snapshot, error) {
	switch info, err := os.Stat(path); {
	case err != nil:
		return nil, err
	case !info.IsDir():
		return nil, errors.New("it is not a folder")
	}
	said, err := readWhole(filepath.Join(path, sumsFile), sumsBytesMax)
	if err != nil {
		return nil, err
	}
	text, err := readWhole(filepath.Join(path, manifestFile), manifestBytesMax)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(text)
	manifestSum := hex.EncodeToString(sum[:])
	own := said // the lines of manifest.json and state.safetensors
	if lines := bytes.SplitAfterN(said, []byte("\n"), 3); len(lines) == 3 {
		own = said[:len(lines[0])+len(lines[1])]
	}
	wantManifest, wantTensors, err := parseSums(own)
	if err != nil {
		return nil, err
	}
	if manifestSum != wantManifest {
		return nil, damaged(manifestFile, manifestSum, wantManifest)
	}
	var m manifest
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	err = d.Decode(&m)
	switch {
	case m.Format == formatName && m.Version > formatVersion:
		return nil, fmt.Errorf("%s is of version %d; this program reads version %d and older ones", manifestFile, m.Version,
			formatVersion)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", manifestFile, err)
	case m.Format != formatName || m.Version < 1 || m.Step < 0:
		return nil, fmt.Errorf("%s has format %q, version %d, step %d: not a snapshot", manifestFile, m.Format, m.Version,
			m.Step)
	}
	if n, ok := parseName(filepath.Base(path)); ok && n.step != m.Step {
		return nil, fmt.Errorf("%s is of step %d: the folder was renamed, or mixes files of two snapshots", manifestFile,
			m.Step)
	}
	if !bytes.Equal(said[len(own):], partSums(m.Parts)) {
		return nil, fmt.Errorf("%s does not have the sums of the parts in %s: damaged, or of another snapshot", sumsFile,
			manifestFile)
	}
	s := &Snapshot{Contents: Contents{Step: m.Step, State: m.State}, Path: path, Written: m.Written}
	names := map[string]bool{}
	for _, p := range append([]Part{{tensorsFile, m.Bytes, wantTensors}}, m.Parts...) {
		if p.File != tensorsFile && !partPattern.MatchString(p.File) {
			return nil, fmt.Errorf("%s lists a part %q: not a snapshot", manifestFile, p.File)
		}
		tensors, err := r.readTensors(filepath.Join(path, p.File), p.Bytes, p.SHA256)
		if err != nil {
			return nil, err
		}
		for _, t := range tensors {
			if names[t.Name] {
				return nil, fmt.Errorf("%s: the tensor %s is in two parts", p.File, t.Name)
			}
			names[t.Name] = true
		}
		s.Tensors = append(s.Tensors, tensors...)
	}
	return s, nil
}

// readTensors reads a safetensors file after verifying its size and SHA-256.
func (r Reader) readTensors(path string, size int64, want string) ([]Tensor, error) {
	file := filepath.Base(path)
	f, info, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info.Size() != size {
		return nil, fmt.Errorf("%s has %d bytes, %s says %d: truncated, or of another snapshot", file, info.Size(),
			manifestFile, size)
	}
	in, h := io.ReaderAt(f), sha256.New()
	if r.Progress != nil {
		in = &inPieces{f, r.Progress}
	}
	if _, err := io.CopyBuffer(h, io.NewSectionReader(in, 0, size), make([]byte, pieceBytes)); err != nil {
		return nil, err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return nil, damaged(file, got, want)
	}
	tensors, _, err := Read(in, size)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return tensors, nil
}

// pieceBytes is how much a Reader reads at once.
const pieceBytes = 1 << 20

// inPieces reports each piece that is read.
type inPieces struct {
	io.ReaderAt
	progress func()
}

func (r *inPieces) ReadAt(b []byte, at int64) (n int, err error) {
	for first := true; first || n < len(b) && err == nil; first = false {
		var read int
		read, err = r.ReaderAt.ReadAt(b[n:min(n+pieceBytes, len(b))], at+int64(n))
		n += read
		r.progress()
	}
	return n, err
}

func damaged(file, got, want string) error {
	return fmt.Errorf("%s is damaged: its SHA-256 is %s, %s says %s", file, got, sumsFile, want)
}

// parseSums returns the checksums in SHA256SUMS. The text must be exactly what sums writes.
func parseSums(text []byte) (manifest, tensors string, err error) {
	if f := strings.Fields(string(text)); len(f) == 4 {
		manifest, tensors = f[0], f[2]
	}
	raw, err := hex.DecodeString(manifest + tensors)
	if err != nil || len(raw) != 2*sha256.Size || !bytes.Equal(text, sums(manifest, tensors)) {
		return "", "", fmt.Errorf("%s is damaged: want one SHA-256 for %s and one for %s", sumsFile, manifestFile,
			tensorsFile)
	}
	return manifest, tensors, nil
}

// readWhole reads a regular file of at most the given number of bytes.
func readWhole(path string, most int64) ([]byte, error) {
	f, info, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info.Size() > most {
		return nil, fmt.Errorf("%s has %d bytes: want at most %d", filepath.Base(path), info.Size(), most)
	}
	return io.ReadAll(io.LimitReader(f, most))
}

// openRegular opens a regular file. It rejects other files, such as pipes, which could block the reader.
func openRegular(path string) (*os.File, os.FileInfo, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("%s is not a regular file", filepath.Base(path))
	}
	f, err := os.Open(path)
	return f, info, err
}
