// Package cli has what the subcommands share: errors and exit codes, help texts and completion, values of flags, tables
// and JSON, signals, and processes of this program.
package cli

import (
	"errors"
	"fmt"
)

// Exit codes.
const (
	ExitOK          = 0
	ExitError       = 1   // something went wrong
	ExitUsage       = 2   // the command line is wrong
	ExitInterrupted = 130 // Ctrl-C or SIGTERM, as in shells
)

// HelpColumns is the maximum width of a help text.
const HelpColumns = 80

// ErrInterrupted is the error of a command that the user stopped. The command has already reported it.
var ErrInterrupted = errors.New("interrupted")

// CodeError ends the command with an exit code, for example that of another program. The command has already printed
// the reason.
type CodeError struct{ Code int }

func (e *CodeError) Error() string { return fmt.Sprintf("exit code %d", e.Code) }

// UsageError is a mistake in the command line that only the command itself can detect.
type UsageError struct{ text string }

func (e *UsageError) Error() string { return e.text }

// Usagef returns an error about the command line, after which the command prints how to get help.
func Usagef(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }
