// Package redact hides what errors, logs and pages must not show.
package redact

import "regexp"

var userInfo = regexp.MustCompile(`(://)[^/\s]*@|^[^/\s:@]*:[^/\s]*@`)

// URL returns a URL or an address, "scheme://user:password@host:port" or "user:password@host:port", with … in place of
// the user and the password. Of several, separated by commas, those before the last "@" are hidden too. A name before
// "@" stays if it has neither a scheme nor a password.
func URL(s string) string { return userInfo.ReplaceAllString(s, "$1…@") }
