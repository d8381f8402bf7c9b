package stacks

import (
	"math"
	"strconv"
	"strings"
)

// Parse reads the text of one or more goroutines' stacks. Text before the first goroutine, such as the message of a
// panic, is passed over.
func Parse(text string) []Goroutine {
	var p parser
	for line := range strings.Lines(text) {
		p.line(strings.TrimRight(line, "\r\n"))
	}
	return p.all
}

// parser takes the text line by line. A goroutine is a header, then pairs of lines (a call, and the place of it), of
// which the last may be the go statement that created it, then an empty line.
type parser struct {
	all []Goroutine
	in  bool   // inside a goroutine
	at  *Frame // the frame whose place comes next, or nil
}

func (p *parser) line(line string) {
	switch {
	case strings.HasPrefix(line, "goroutine "):
		g, ok := header(line)
		p.in, p.at = ok, nil
		if ok {
			p.all = append(p.all, g)
		}
	case !p.in:
	case line == "" || strings.HasPrefix(line, "[originating from goroutine "):
		// What follows an ancestor's line is another goroutine's past.
		p.in, p.at = false, nil
	case line[0] == '\t':
		if p.at != nil {
			p.at.File, p.at.Line = place(line[1:])
		}
		p.at = nil
	default:
		p.call(line)
	}
}

// header reads "goroutine 7 gp=0xc000 m=1 mp=0xc001 [select (no cases) (durable), 5 minutes, locked to thread,
// synctest bubble 1 labels:{"k": "v"}]:", of which most is rarely there.
func header(line string) (Goroutine, bool) {
	var g Goroutine
	id, rest, ok := number(strings.TrimPrefix(line, "goroutine "))
	open := strings.IndexByte(rest, '[')
	if !ok || open < 0 || !strings.HasSuffix(rest, "]:") {
		return g, false
	}
	g.ID = id
	inner := rest[open+1 : max(open+1, len(rest)-2)]
	inner, _, _ = strings.Cut(inner, " labels:{")
	for i, part := range strings.Split(inner, ", ") {
		minutes, unit, isNumber := number(part)
		switch {
		case i == 0:
			part = strings.TrimSuffix(part, " (scan)")
			g.State = strings.TrimSuffix(part, " (durable)")
		case isNumber && strings.HasPrefix(unit, " minute") && minutes <= math.MaxInt32:
			g.Minutes = int(minutes)
		}
	}
	return g, true
}

// call reads "pkg.Func(0x1, {0xc000, 0x2}, ...)" and "created by pkg.Func in goroutine 1".
func (p *parser) call(line string) {
	g := &p.all[len(p.all)-1]
	if created, ok := strings.CutPrefix(line, "created by "); ok {
		name, creator, _ := strings.Cut(created, " in goroutine ")
		g.CreatedBy = Frame{Func: name}
		g.Creator, _, _ = number(creator)
		p.at = &g.CreatedBy
		return
	}
	p.at = nil
	// Arguments hold no round brackets, a receiver's type may. "...23 frames elided..." is not a call.
	open := strings.LastIndexByte(line, '(')
	if open <= 0 || !strings.HasSuffix(line, ")") {
		return
	}
	g.Frames = append(g.Frames, Frame{Func: line[:open]})
	p.at = &g.Frames[len(g.Frames)-1]
}

// place reads "/path/file.go:12 +0x1d fp=0x.. sp=0x.. pc=0x..". The path may hold blanks and colons.
func place(s string) (file string, line int) {
	if i := strings.LastIndex(s, " +0x"); i >= 0 {
		s = s[:i]
	} else if i := strings.LastIndex(s, " fp=0x"); i >= 0 {
		s = s[:i]
	}
	colon := strings.LastIndexByte(s, ':')
	if colon <= 0 {
		return "", 0
	}
	n, err := strconv.Atoi(s[colon+1:])
	if err != nil || n < 0 {
		return "", 0
	}
	return s[:colon], n
}

// number reads the decimal digits at the start of s and returns what follows.
func number(s string) (n uint64, rest string, ok bool) {
	end := 0
	for end < len(s) && s[end] >= '0' && s[end] <= '9' {
		end++
	}
	n, err := strconv.ParseUint(s[:end], 10, 64)
	if err != nil {
		return 0, s, false
	}
	return n, s[end:], true
}
