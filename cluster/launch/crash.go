package launch

import (
	"regexp"
	"strings"
)

// The first lines that runtimes write when they end a program.
var crashMarks = []struct{ prefix, kind string }{
	{"panic: ", "panic"},
	{"fatal error: ", "panic"},
	{"unexpected fault address ", "panic"},
	{"Traceback (most recent call last):", "error"},
	{"thread '", "panic"}, // Rust: thread 'main' panicked at …
	{"terminate called ", "panic"},
}

func crashBegins(line string) bool {
	for _, m := range crashMarks {
		if strings.HasPrefix(line, m.prefix) && (m.prefix != "thread '" || strings.Contains(line, "' panicked at ")) {
			return true
		}
	}
	return false
}

// What Go's runtime writes when a signal from outside Go code ends a program: a library's abort, a
// segmentation violation in it. "SIGABRT: abort", and in the next line where; at the end, after all
// goroutines, the registers.
var (
	signalHeader   = regexp.MustCompile(`^SIG[A-Z0-9]+: `)
	signalPlace    = regexp.MustCompile(`^PC=0x[0-9a-f]+ m=-?[0-9]+ sigcode=`)
	signalRegister = regexp.MustCompile(`^[a-z][a-z0-9]{0,6} +0x[0-9a-f]+$`)
	// fatalLine matches the message that C and C++ libraries write before they abort: absl and glog (XLA's
	// failed CHECK), the C++ runtime, assert, glibc.
	fatalLine = regexp.MustCompile(`^F[0-9]{4} |Check failed: |^terminate called |: Assertion .* failed\.?$` +
		`|^(double free|free|malloc|munmap_chunk|corrupted)[^a-z]`)
)

// nativeCrash returns the index of a native crash's header in a crash's lines, -1 if there is none. The lines
// before it are the program's last output.
func nativeCrash(lines []string) int {
	for i := range len(lines) - 1 {
		if signalHeader.MatchString(lines[i]) && signalPlace.MatchString(lines[i+1]) {
			return i
		}
	}
	return -1
}

// nativeMessage summarises a native crash in one sentence.
func nativeMessage(before, crash []string) string {
	message := crash[0]
	for _, line := range crash[1:min(len(crash), 4)] {
		if line == "signal arrived during cgo execution" {
			message += ", in native code"
		}
	}
	last := ""
	for _, line := range before {
		if fatalLine.MatchString(line) {
			return message + ": " + strings.TrimSpace(line)
		}
		if line = strings.TrimSpace(line); line != "" {
			last = line
		}
	}
	if last == "" {
		return message
	}
	return message + "; the line before: " + last
}

// crashed returns the kind of failure and a one-sentence message for a crash's lines; "" if there are none.
func crashed(lines []string) (kind, message string) {
	if len(lines) == 0 {
		return "", ""
	}
	if i := nativeCrash(lines); i >= 0 {
		return "signal", nativeMessage(lines[:i], lines[i:])
	}
	for _, m := range crashMarks {
		if strings.HasPrefix(lines[0], m.prefix) {
			kind = m.kind
			break
		}
	}
	message = lines[0]
	if strings.HasPrefix(message, "Traceback ") { // the message is the first line that is not indented
		for _, l := range lines[1:] {
			if l != "" && l[0] != ' ' {
				message = l
				break
			}
		}
	}
	if full(message) {
		kind = "disk"
	}
	return kind, message
}

// full reports whether a message is about a full disk.
func full(message string) bool {
	return strings.Contains(strings.ToLower(message), "no space left on device")
}
