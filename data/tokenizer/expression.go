package tokenizer

import (
	"fmt"
	"time"

	"github.com/dlclark/regexp2"
)

// matchMax is the longest time for one match of an expression. Those of real tokenizers need microseconds; an
// expression such as (a+)+b tries exponentially many ways.
var matchMax = 10 * time.Second // a test shortens it

// expression is a regular expression with backtracking. Its matches have a time limit.
type expression struct {
	at   *regexp2.Regexp
	text string
}

func compile(text string) (*expression, error) {
	at, err := regexp2.Compile(text, regexp2.None)
	if err != nil {
		return nil, err
	}
	at.MatchTimeout = matchMax
	return &expression{at, text}, nil
}

// mustCompile is compile for expressions of this package.
func mustCompile(text string) *expression {
	e, err := compile(text)
	if err != nil {
		panic(err)
	}
	return e
}

// each calls f for each match, which are runes [from, to), in their order.
func (e *expression) each(text []rune, f func(from, to int)) error {
	m, err := limited(e, func() (*regexp2.Match, error) { return e.at.FindRunesMatch(text) })
	for m != nil {
		f(m.Index, m.Index+m.Length)
		last := m
		m, err = limited(e, func() (*regexp2.Match, error) { return e.at.FindNextMatch(last) })
	}
	return err
}

// replace replaces the matches by a text.
func (e *expression) replace(text, by string) (string, error) {
	return limited(e, func() (string, error) { return e.at.Replace(text, by, -1, -1) })
}

// limited calls match a second time if it fails: its only errors are of the time limit, which also passes while the
// process is stopped.
func limited[T any](e *expression, match func() (T, error)) (T, error) {
	result, err := match()
	if err != nil {
		result, err = match()
	}
	if err != nil {
		err = fmt.Errorf("tokenizer: the expression %.200q finds no match within %v: it tries too many ways; use another "+
			"tokenizer.json", e.text, e.at.MatchTimeout)
	}
	return result, err
}
