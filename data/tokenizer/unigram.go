package tokenizer

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/rivo/uniseg"
	"golang.org/x/text/unicode/norm"
)

// unigram is SentencePiece's Unigram model (Kudo, 2018), as of T5, ALBERT and XLM-R: a word is divided into the pieces
// of the largest sum of scores.
type unigram struct {
	pieces  []string
	scores  []float64
	ids     map[string]int32
	sorted  []int32 // the pieces in the order of their texts
	unknown int32   // -1: none
	penalty float64 // score of a character that no piece has
	bytes   []int32 // by byte: the pieces <0x00> to <0xFF> for such characters; nil: none
	meta    metaspace
	spaces  bool // words are separated at white space, which is dropped
	strips  bool // the normalizer drops white space at the beginning
}

// metaspace is how spaces become part of the pieces.
type metaspace struct {
	mark  string // that replaces a space
	first bool   // it is put before the beginning of the text only
	never bool   // it is put before nothing
	whole bool   // words are not separated
}

// unknownPenalty is what a character that no piece has costs more than the worst piece.
const unknownPenalty = 10

// parseUnigram reads the model, its normalizer, pre-tokenizer and decoder.
func (t *Tokenizer) parseUnigram(contents []byte) error {
	var file struct {
		Normalizer   *step `json:"normalizer"`
		PreTokenizer *step `json:"pre_tokenizer"`
		Decoder      *step `json:"decoder"`
		Model        struct {
			Vocab        []json.RawMessage `json:"vocab"`
			UnknownID    *int              `json:"unk_id"`
			ByteFallback bool              `json:"byte_fallback"`
		} `json:"model"`
	}
	if err := json.Unmarshal(contents, &file); err != nil {
		return fmt.Errorf("a Unigram model: %w", err)
	}
	u := &unigram{unknown: -1, ids: map[string]int32{}, penalty: math.Inf(1)}
	for i, entry := range file.Model.Vocab {
		var pair [2]json.RawMessage
		var piece string
		var score float64
		err := json.Unmarshal(entry, &pair)
		if err == nil {
			err = errors.Join(json.Unmarshal(pair[0], &piece), json.Unmarshal(pair[1], &score))
		}
		if err != nil {
			return fmt.Errorf("piece %d of the Unigram model: %w: want a text and its score", i, err)
		}
		u.pieces, u.scores, u.ids[piece] = append(u.pieces, piece), append(u.scores, score), int32(i)
		u.sorted, u.penalty = append(u.sorted, int32(i)), min(u.penalty, score)
	}
	slices.SortFunc(u.sorted, func(a, b int32) int { return strings.Compare(u.pieces[a], u.pieces[b]) })
	if len(u.pieces) == 0 {
		return errors.New("the Unigram model has no vocabulary: want a list of texts and their scores")
	}
	u.penalty -= unknownPenalty
	t.size = max(t.size, len(u.pieces))
	if id := file.Model.UnknownID; id != nil {
		if *id < 0 || *id >= len(u.pieces) {
			return fmt.Errorf("the Unigram model has unk_id %d, and %d pieces", *id, len(u.pieces))
		}
		u.unknown = int32(*id)
	}
	if file.Model.ByteFallback {
		for b := range 256 {
			id, ok := u.ids[fmt.Sprintf("<0x%02X>", b)]
			if !ok {
				return fmt.Errorf("the Unigram model has byte_fallback, and lacks <0x%02X>: want all 256", b)
			}
			u.bytes = append(u.bytes, id)
		}
	}
	if u.unknown < 0 {
		return errors.New("the Unigram model has no unk_id, so some texts would have no tokens")
	}
	normalize, err := normalizerOf(file.Normalizer)
	if err != nil {
		return err
	}
	if n := file.Normalizer; n != nil {
		u.strips = slices.ContainsFunc(append(n.Normalizers, *n), func(s step) bool {
			return s.Type == "Strip" && s.StripLeft
		})
	}
	t.normalize, t.unigram = normalize, u
	if err := u.setPreTokenizer(file.PreTokenizer); err != nil {
		return err
	}
	return u.checkDecoder(file.Decoder)
}

// setPreTokenizer reads Metaspace, which WhitespaceSplit may precede.
func (u *unigram) setPreTokenizer(pre *step) error {
	if pre == nil {
		return errors.New("a Unigram model without a pre-tokenizer: supported is Metaspace, after WhitespaceSplit or not")
	}
	steps := []step{*pre}
	if pre.Type == "Sequence" {
		steps = pre.PreTokenizers
	}
	for i, s := range steps {
		switch {
		case s.Type == "WhitespaceSplit" && i == 0 && len(steps) == 2:
			u.spaces = true
		case s.Type == "Metaspace" && i == len(steps)-1:
			m, err := metaspaceOf(s)
			u.meta = m
			return err
		default:
			return fmt.Errorf("a Unigram model with the pre-tokenizer %q: supported is Metaspace, after WhitespaceSplit or "+
				"not", s.Type)
		}
	}
	return errors.New("a Unigram model without the pre-tokenizer Metaspace")
}

// metaspaceOf reads a Metaspace step, of the older form with add_prefix_space too.
func metaspaceOf(s step) (m metaspace, err error) {
	m = metaspace{mark: s.Replacement, whole: s.Split != nil && !*s.Split}
	if m.mark == "" {
		m.mark = "▁"
	}
	switch {
	case utf8.RuneCountInString(m.mark) != 1:
		err = fmt.Errorf("metaspace has the replacement %q: want one character", m.mark)
	case s.PrependScheme == "always" || s.PrependScheme == "" && s.AddPrefixSpace:
	case s.PrependScheme == "first":
		m.first = true
	case s.PrependScheme == "never" || s.PrependScheme == "":
		m.never = true
	default:
		err = fmt.Errorf("metaspace has the prepend_scheme %q: want always, first or never", s.PrependScheme)
	}
	return m, err
}

// checkDecoder returns an error if the decoder is not that of the pre-tokenizer.
func (u *unigram) checkDecoder(decoder *step) error {
	if decoder == nil {
		return errors.New("a Unigram model without a decoder: supported is Metaspace")
	}
	steps := []step{*decoder}
	if decoder.Type == "Sequence" {
		steps = decoder.Decoders
	}
	for i, s := range steps {
		if s.Type == "ByteFallback" && i == 0 && len(steps) == 2 {
			continue
		}
		if s.Type != "Metaspace" || i != len(steps)-1 {
			return fmt.Errorf("a Unigram model with the decoder %q: supported is Metaspace, after ByteFallback or not", s.Type)
		}
		if m, err := metaspaceOf(s); err != nil || m.mark != u.meta.mark || m.never != u.meta.never {
			return fmt.Errorf("the decoder Metaspace differs from the pre-tokenizer (%w)", err)
		}
	}
	if u.bytes != nil && len(steps) == 1 {
		return errors.New("a Unigram model with byte_fallback, and a decoder without ByteFallback")
	}
	return nil
}

// words divides a normalized text that begins a text or follows an added token.
func (u *unigram) words(text string, begins bool) (words []string) {
	parts := []string{text}
	if u.spaces {
		parts = strings.Fields(text)
		begins = begins && len(parts) > 0 && strings.HasPrefix(text, parts[0])
	}
	for i, part := range parts {
		part = strings.ReplaceAll(part, " ", u.meta.mark)
		if !u.meta.never && (!u.meta.first || begins && i == 0) && !strings.HasPrefix(part, u.meta.mark) {
			part = u.meta.mark + part
		}
		if u.meta.whole {
			words = append(words, part)
			continue
		}
		for part != "" { // each mark begins a word
			end := strings.Index(part[1:], u.meta.mark) + 1
			if end == 0 {
				end = len(part)
			}
			words, part = append(words, part[:end]), part[end:]
		}
	}
	return words
}

// word returns the pieces of a word with the largest sum of scores, by Viterbi's algorithm. Characters that no piece
// has are one unknown token together, or their bytes.
func (u *unigram) word(w string) (tokens []int32) {
	type node struct {
		from  int // -1: not reached
		piece int32
		score float64
	}
	best := make([]node, len(w)+1) // by byte: of the pieces up to it
	for i := range best {
		best[i].from = -1
	}
	best[0].from = 0
	reach := func(from, to int, piece int32, score float64) {
		if score += best[from].score; best[to].from < 0 || score > best[to].score {
			best[to] = node{from, piece, score}
		}
	}
	for from := 0; from < len(w); {
		_, width := utf8.DecodeRuneInString(w[from:])
		known := false
		begin, end := 0, len(u.sorted) // the pieces that begin as the word does from there on
		for to := from; to < len(w) && begin < end; {
			_, next := utf8.DecodeRuneInString(w[to:])
			for range next {
				begin, end = u.narrow(begin, end, to-from, w[to])
				to++
			}
			if begin < end && len(u.pieces[u.sorted[begin]]) == to-from {
				id := u.ids[w[from:to]]
				reach(from, to, id, u.scores[id])
				known = known || to == from+width
			}
		}
		if !known {
			reach(from, from+width, u.unknown, u.penalty)
		}
		from += width
	}
	fused := false // the last token is of unknown characters
	for end := len(w); end > 0; end = best[end].from {
		n := best[end]
		if n.piece != u.unknown {
			tokens, fused = append(tokens, n.piece), false
			continue
		}
		if u.bytes != nil {
			for i := end - 1; i >= n.from; i-- {
				tokens = append(tokens, u.bytes[w[i]])
			}
		} else if !fused {
			tokens = append(tokens, u.unknown)
		}
		fused = true
	}
	slices.Reverse(tokens)
	return tokens
}

// narrow returns those of the sorted pieces from begin to end, all with the same n first bytes, that have b next.
func (u *unigram) narrow(begin, end, n int, b byte) (from, to int) {
	from = begin + sort.Search(end-begin, func(i int) bool {
		p := u.pieces[u.sorted[begin+i]]
		return len(p) > n && p[n] >= b
	})
	return from, from + sort.Search(end-from, func(i int) bool { return u.pieces[u.sorted[from+i]][n] > b })
}

// decode returns the text of tokens, without special ones.
func (u *unigram) decode(t *Tokenizer, tokens []int32) string {
	var text strings.Builder
	var raw []byte // of <0x00> to <0xFF>
	first := true
	flush := func() {
		if utf8.Valid(raw) {
			text.Write(raw)
		} else {
			text.WriteString(strings.Repeat("\ufffd", len(raw)))
		}
		raw = raw[:0]
	}
	for _, id := range tokens {
		if t.special[id] || id < 0 {
			continue
		}
		piece, ok := t.addedText[id]
		if !ok && int(id) < len(u.pieces) {
			piece = u.pieces[id]
		}
		if hex, isByte := strings.CutPrefix(piece, "<0x"); u.bytes != nil && isByte && len(piece) == 6 && piece[5] == '>' {
			if b, err := strconv.ParseUint(hex[:2], 16, 8); err == nil {
				raw, first = append(raw, byte(b)), false
				continue
			}
		}
		flush()
		switch {
		case first && !u.meta.never:
			piece = strings.ReplaceAll(piece, u.meta.mark, "")
		default:
			piece = strings.ReplaceAll(piece, u.meta.mark, " ")
		}
		text.WriteString(piece)
		first = false
	}
	flush()
	return text.String()
}

// normalizerOf returns the function of a normalizer.
func normalizerOf(normalizer *step) (func(*allowance, string) (string, error), error) {
	steps := []step{}
	if normalizer != nil {
		steps = []step{*normalizer}
		if normalizer.Type == "Sequence" {
			steps = normalizer.Normalizers
		}
	}
	var list []func(*allowance, string) (string, error)
	for _, s := range steps {
		f, err := s.replacer()
		if f == nil && err == nil {
			var total func(string) string
			total, err = s.normalizer()
			f = func(_ *allowance, s string) (string, error) { return total(s), nil }
		}
		if err != nil {
			return nil, err
		}
		list = append(list, f)
	}
	return func(a *allowance, s string) (string, error) {
		var err error
		for _, f := range list {
			if s, err = f(a, s); err != nil {
				return "", err
			}
		}
		return s, nil
	}, nil
}

// forms are Unicode's.
var forms = map[string]norm.Form{"NFC": norm.NFC, "NFD": norm.NFD, "NFKC": norm.NFKC, "NFKD": norm.NFKD}

// replacer returns the normalizer Replace of an expression, or nil for another step.
func (s *step) replacer() (func(*allowance, string) (string, error), error) {
	if s.Type != "Replace" || s.Pattern.Regex == "" {
		return nil, nil
	}
	at, err := compile(s.Pattern.Regex)
	if err != nil {
		return nil, fmt.Errorf("the pattern %q of the normalizer: %w", s.Pattern.Regex, err)
	}
	return func(a *allowance, text string) (string, error) { return at.replace(a, text, s.Content) }, nil
}

// normalizer returns the function of a step that needs no expression.
func (s *step) normalizer() (func(string) string, error) {
	if form, ok := forms[s.Type]; ok {
		return form.String, nil
	}
	switch s.Type {
	case "Lowercase":
		return func(text string) string { // of each letter alone, as Hugging Face's library has it
			return strings.Map(unicode.ToLower, strings.ReplaceAll(text, "İ", "i\u0307"))
		}, nil
	case "StripAccents":
		return func(text string) string {
			return strings.Map(func(r rune) rune {
				if unicode.Is(unicode.M, r) {
					return -1
				}
				return r
			}, text)
		}, nil
	case "Strip":
		return func(text string) string {
			if s.StripLeft {
				text = strings.TrimLeftFunc(text, unicode.IsSpace)
			}
			if s.StripRight {
				text = strings.TrimRightFunc(text, unicode.IsSpace)
			}
			return text
		}, nil
	case "Replace":
		if s.Pattern.String == "" {
			return nil, errors.New("the normalizer Replace has no pattern")
		}
		return strings.NewReplacer(s.Pattern.String, s.Content).Replace, nil
	case "Precompiled":
		return precompiled(s.Charsmap)
	}
	return nil, fmt.Errorf("a Unigram model with the normalizer %q: supported are Precompiled, Replace, Lowercase, "+
		"StripAccents, Strip, NFC, NFD, NFKC and NFKD", s.Type)
}

// precompiled returns SentencePiece's normalization by a table of replacements: a double-array trie of texts, whose
// values are offsets of texts that end with 0.
func precompiled(charsmap string) (func(string) string, error) {
	const what = "precompiled_charsmap"
	table, err := base64.StdEncoding.DecodeString(charsmap)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if len(table) == 0 {
		return func(s string) string { return s }, nil
	}
	if len(table) < 4 {
		return nil, fmt.Errorf("%s has %d bytes: want a trie", what, len(table))
	}
	n := int64(binary.LittleEndian.Uint32(table))
	if n%4 != 0 || n < 4 || n > int64(len(table)-4) {
		return nil, fmt.Errorf("%s has %d bytes, and a trie of %d", what, len(table), n)
	}
	m := charsMap{texts: string(table[4+n:])}
	for at := int64(4); at < 4+n; at += 4 {
		m.trie = append(m.trie, binary.LittleEndian.Uint32(table[at:]))
	}
	return m.normalize, nil
}

type charsMap struct {
	trie  []uint32
	texts string
}

func (m *charsMap) normalize(text string) string {
	var out strings.Builder
	state := -1
	for text != "" {
		var cluster string
		cluster, text, _, state = uniseg.FirstGraphemeClusterInString(text, state)
		if len(cluster) < 6 { // as Hugging Face's library has it
			if to, ok := m.find(cluster); ok {
				out.WriteString(to)
				continue
			}
		}
		for _, r := range cluster {
			one := string(r)
			if to, ok := m.find(one); ok {
				one = to
			}
			out.WriteString(one)
		}
	}
	return out.String()
}

// find returns the replacement of the shortest beginning of key in the trie, as Hugging Face's library does.
func (m *charsMap) find(key string) (text string, ok bool) {
	at := uint32(0)
	step := func(by uint32) (unit uint32, ok bool) {
		if at ^= by; int64(at) >= int64(len(m.trie)) {
			return 0, false
		}
		return m.trie[at], true
	}
	offset := func(unit uint32) uint32 { return unit >> 10 << (unit & (1 << 9) >> 6) }
	unit, ok := step(0)
	if !ok {
		return "", false
	}
	at ^= offset(unit)
	for i := range len(key) {
		if key[i] == 0 {
			break
		}
		if unit, ok = step(uint32(key[i])); !ok || unit&(1<<31|0xff) != uint32(key[i]) {
			return "", false
		}
		at ^= offset(unit)
		if unit>>8&1 == 0 {
			continue
		}
		leaf, ok := step(0)
		from := leaf & (1<<31 - 1)
		if !ok || int64(from) > int64(len(m.texts)) {
			return "", false
		}
		text, _, _ := strings.Cut(m.texts[from:], "\x00")
		return text, true
	}
	return "", false
}
