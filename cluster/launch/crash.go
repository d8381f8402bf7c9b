package launch

import "strings"

// The first lines of what a runtime writes when it ends a program.
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

// crashed reads what kind of a failure a crash's lines tell, in one sentence; "" if there are none.
func crashed(lines []string) (kind, message string) {
	if len(lines) == 0 {
		return "", ""
	}
	for _, m := range crashMarks {
		if strings.HasPrefix(lines[0], m.prefix) {
			kind = m.kind
			break
		}
	}
	message = lines[0]
	if strings.HasPrefix(message, "Traceback ") { // the sentence is the first line that is not indented
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

// full reports whether a message tells of a disk without space.
func full(message string) bool {
	return strings.Contains(strings.ToLower(message), "no space left on device")
}
