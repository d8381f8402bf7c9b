package cli

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// Warnings returns a logger of warnings.
func Warnings(out io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// JobID returns a name for a job without one.
func JobID(command string) string {
	return fmt.Sprintf("%s-%s-%d", command, time.Now().UTC().Format("20060102-150405"), os.Getpid())
}

// OwnCommand returns the command line of a subcommand of this executable.
func OwnCommand(args ...string) ([]string, error) {
	path, err := exec.LookPath(os.Args[0])
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		if path, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("the path of this executable: %w", err)
		}
	}
	return append([]string{path}, args...), nil
}

// WriteFile writes a file atomically.
func WriteFile(file string, content []byte) error {
	return checkpoint.WriteFile(file, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	})
}

// EndWith returns the error that makes the command exit with a code without a message; nil for 0.
func EndWith(code int) error {
	if code == ExitOK {
		return nil
	}
	return &CodeError{code}
}
