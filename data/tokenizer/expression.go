package tokenizer

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/dlclark/regexp2"
)

// The longest time for all matches of one text is textMax and runeMax for each of its runes. Expressions of real
// tokenizers need microseconds for a match; one such as (a+)+b tries exponentially many ways.
var (
	textMax = time.Second // a test shortens it
	runeMax = 20 * time.Microsecond
)

// allowance is the time that the expressions may still take for a text.
type allowance struct{ whole, left time.Duration }

// allow returns the allowance of a text.
func allow(text string) *allowance {
	d := textMax + time.Duration(len(text))*runeMax
	return &allowance{d, d}
}

// expression is a regular expression with backtracking. Its matches have a time limit.
type expression struct {
	text string
	pool sync.Pool // of *regexp2.Regexp: each has the time limit of the text that uses it
}

func compile(text string) (*expression, error) {
	at, err := regexp2.Compile(text, regexp2.None)
	if err != nil {
		return nil, err
	}
	e := &expression{text: text, pool: sync.Pool{New: func() any { return regexp2.MustCompile(text, regexp2.None) }}}
	e.pool.Put(at)
	return e, nil
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
func (e *expression) each(a *allowance, text []rune, f func(from, to int)) error {
	at := e.pool.Get().(*regexp2.Regexp)
	defer e.pool.Put(at)
	m, err := e.next(a, at, func() (*regexp2.Match, error) { return at.FindRunesMatch(text) })
	for m != nil {
		f(m.Index, m.Index+m.Length)
		last := m
		m, err = e.next(a, at, func() (*regexp2.Match, error) { return at.FindNextMatch(last) })
	}
	return err
}

// replace replaces the matches by a text.
func (e *expression) replace(a *allowance, text, by string) (string, error) {
	runes, out, end := []rune(text), strings.Builder{}, 0
	err := e.each(a, runes, func(from, to int) {
		out.WriteString(string(runes[end:from]) + by)
		end = to
	})
	return out.String() + string(runes[end:]), err
}

// next makes one match and takes its time from the allowance. The only error of match is that of its time limit. Time
// also passes while the process is stopped or waits for a processor, so a match that takes too long is made once more.
func (e *expression) next(
	a *allowance, at *regexp2.Regexp, match func() (*regexp2.Match, error),
) (*regexp2.Match, error) {
	for range 2 {
		at.MatchTimeout = a.left
		began := time.Now()
		m, err := match()
		if took := time.Since(began); err == nil && took < a.left {
			a.left -= took
			return m, nil
		}
	}
	return nil, fmt.Errorf("tokenizer: the expression %.200q does not find its matches in a text within %v: it tries "+
		"too many ways; use another tokenizer.json", e.text, a.whole)
}
