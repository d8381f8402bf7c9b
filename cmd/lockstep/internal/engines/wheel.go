package engines

import (
	"archive/zip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// extractWheel writes files of a wheel to the paths that place returns for their names in the wheel; it leaves out
// those for which it returns "". It compares each with the checksum in the wheel's list of files, and puts it in place
// only when it is complete. It returns how many it has written.
func extractWheel(wheel string, place func(name string) string) (n int, err error) {
	archive, err := zip.OpenReader(wheel)
	if err != nil {
		return 0, fmt.Errorf("open the wheel %s: %w", wheel, err)
	}
	defer archive.Close()
	sums, err := wheelSums(&archive.Reader)
	if err != nil {
		return 0, fmt.Errorf("the wheel %s: %w", wheel, err)
	}
	for _, f := range archive.File {
		to := place(f.Name)
		if to == "" || strings.HasSuffix(f.Name, "/") {
			continue
		}
		if !filepath.IsLocal(f.Name) {
			return n, fmt.Errorf("the wheel %s has a file outside of its folder: %q", wheel, f.Name)
		}
		if err := extract(f, to, sums[f.Name]); err != nil {
			return n, fmt.Errorf("the wheel %s: %s: %w", wheel, f.Name, err)
		}
		n++
	}
	return n, nil
}

// wheelSums reads the list RECORD of a wheel: SHA-256 sums in base64, by the names of the files.
func wheelSums(archive *zip.Reader) (map[string]string, error) {
	for _, f := range archive.File {
		if dir, name := path.Split(f.Name); name != "RECORD" || !strings.HasSuffix(dir, ".dist-info/") {
			continue
		}
		r, err := f.Open()
		if err != nil {
			return nil, err
		}
		defer r.Close()
		rows, err := csv.NewReader(r).ReadAll()
		if err != nil {
			return nil, fmt.Errorf("its list of files: %w", err)
		}
		sums := map[string]string{}
		for _, row := range rows {
			if len(row) > 1 {
				sums[row[0]] = strings.TrimPrefix(row[1], "sha256=")
			}
		}
		return sums, nil
	}
	return nil, errors.New("no list of its files (RECORD): the file is truncated or not a wheel; download it again")
}

// extract writes a file of a wheel, and compares it with its sum.
func extract(f *zip.File, to, want string) (err error) {
	if want == "" {
		return errors.New("the wheel's list of files has no SHA-256 sum of it")
	}
	r, err := f.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(to), ".wheel-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // fails after the rename
	hash := sha256.New()
	if _, err = io.Copy(io.MultiWriter(tmp, hash), r); err == nil {
		err = tmp.Chmod(f.Mode().Perm() | 0o644)
	}
	if closed := tmp.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	if got := base64.RawURLEncoding.EncodeToString(hash.Sum(nil)); got != want {
		return fmt.Errorf("its SHA-256 sum is %s, and the wheel's list of files says %s: download the wheel again", got, want)
	}
	return os.Rename(tmp.Name(), to)
}

// isNVIDIA reports whether a file of a wheel belongs to NVIDIA's libraries, all of which lie in one folder.
func isNVIDIA(name string) bool { return strings.HasPrefix(name, "nvidia/") }
