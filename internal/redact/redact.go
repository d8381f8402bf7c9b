// Package redact hides what errors, logs and pages must not show.
package redact

import (
	"regexp"
	"strings"
)

var userInfo = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*)?://\S*@|^[^/\s:@]*:\S*@`)

// URL returns a URL or an address, "scheme://user:password@host:port" or "user:password@host:port", with … in place of
// the user and the password. All before the last "@" is hidden, since a password may contain any character; so are the
// hosts of a path that has one, except those of file://. A name before "@" stays if it has neither a scheme nor a
// password.
func URL(s string) string {
	return userInfo.ReplaceAllStringFunc(s, func(found string) string {
		scheme, rest, ok := strings.Cut(found, "://")
		switch {
		case !ok || strings.Contains(scheme, ":"): // user:password@
			return "…@"
		case scheme == "file":
			return "file://" + URL(rest)
		}
		return scheme + "://…@"
	})
}
