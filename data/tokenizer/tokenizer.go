// Package tokenizer reads Hugging Face's tokenizer.json, the file that models on the Hugging Face Hub come with, as a
// [data.Tokenizer]:
//
//	t, err := tokenizer.Load("gpt2/tokenizer.json")
//	tokens, err := data.LoadText(t, "book.txt")
//	sequences, err := data.Sequences(tokens, 128)
//
// It gives the tokens that Hugging Face's own library gives, for byte-level byte-pair encoding (GPT-2, Llama 3, Qwen
// and most others since), WordPiece (BERT) and SentencePiece's Unigram models (T5, ALBERT, XLM-R). It returns an error
// for files that need anything else, such as SentencePiece's byte-pair encoding.
package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/dlclark/regexp2"
	"github.com/gomlx/go-huggingface/tokenizers/api"
	"github.com/gomlx/go-huggingface/tokenizers/hftokenizer"
)

// Tokenizer is a tokenizer of Hugging Face. Several goroutines may use it at once.
type Tokenizer struct {
	lib        *hftokenizer.Tokenizer // nil: unigram
	unigram    *unigram
	addedText  map[int32]string
	size       int
	added      []addedToken // the longest first
	special    map[int32]bool
	vocabulary map[string]int32 // of the model, if a word that is in it is not split
	byteLevel  bool             // bytes are mapped to letters, and lib gets single words
	normalize  func(*allowance, string) (string, error)
	prefix     bool // a space is put before each text
	splits     []split

	words sync.Map // string → []int32: the tokens of words
	mu    sync.Mutex
	count int // of words
}

// The tokens of so many words, of at most so many bytes, are kept.
const (
	wordsMax = 1 << 17
	wordMax  = 1 << 8
)

type addedToken struct {
	ID         int    `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	Lstrip     bool   `json:"lstrip"`
	Rstrip     bool   `json:"rstrip"`
	Special    bool   `json:"special"`
}

// step is a normalizer or pre-tokenizer.
type step struct {
	Type           string  `json:"type"`
	Normalizers    []step  `json:"normalizers"`
	PreTokenizers  []step  `json:"pretokenizers"`
	AddPrefixSpace bool    `json:"add_prefix_space"`
	UseRegex       *bool   `json:"use_regex"`
	Behavior       string  `json:"behavior"`
	Invert         bool    `json:"invert"`
	Pattern        pattern `json:"pattern"`

	Decoders      []step `json:"decoders"`
	Replacement   string `json:"replacement"`
	PrependScheme string `json:"prepend_scheme"`
	Split         *bool  `json:"split"`
	Content       string `json:"content"`
	Charsmap      string `json:"precompiled_charsmap"`
	StripLeft     bool   `json:"strip_left"`
	StripRight    bool   `json:"strip_right"`
}

type pattern struct {
	Regex  string
	String string
}

// split divides a text at the matches of a pattern.
type split struct {
	at     *expression
	remove bool // the matches, if not inverted, are dropped
	invert bool // the pieces between the matches are the delimiters
}

// gpt2Pattern is the pattern of words of a byte-level pre-tokenizer.
const gpt2Pattern = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// fileMax is the largest file that is read.
const fileMax = 256 << 20

// Load reads the named file. Errors name it, and what in it is not supported.
func Load(name string) (*Tokenizer, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	if info.Size() > fileMax {
		return nil, fmt.Errorf("tokenizer: %s has %d bytes: want a tokenizer.json of at most %d", name, info.Size(), fileMax)
	}
	contents, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	t, err := Parse(contents)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %s: %w", name, errors.Unwrap(err))
	}
	return t, nil
}

// Parse is [Load] for the contents of a file.
func Parse(contents []byte) (*Tokenizer, error) {
	t, err := parse(contents)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	return t, nil
}

// tokenizerFile is the part of a tokenizer.json that this package reads itself.
type tokenizerFile struct {
	AddedTokens  []addedToken `json:"added_tokens"`
	Normalizer   *step        `json:"normalizer"`
	PreTokenizer *step        `json:"pre_tokenizer"`
	Model        struct {
		Type         string          `json:"type"`
		Vocab        json.RawMessage `json:"vocab"`
		Dropout      *float64        `json:"dropout"`
		Prefix       *string         `json:"continuing_subword_prefix"`
		Suffix       *string         `json:"end_of_word_suffix"`
		ByteFallback bool            `json:"byte_fallback"`
		IgnoreMerges bool            `json:"ignore_merges"`
	} `json:"model"`
}

func parse(contents []byte) (*Tokenizer, error) {
	var file tokenizerFile
	if err := json.Unmarshal(contents, &file); err != nil {
		return nil, fmt.Errorf("not a tokenizer.json: %w", err)
	}
	m := file.Model
	if m.Type != "BPE" && m.Type != "WordPiece" && m.Type != "Unigram" {
		return nil, fmt.Errorf("a model of type %q: supported are BPE of bytes, WordPiece and Unigram", m.Type)
	}
	t := &Tokenizer{
		added: file.AddedTokens, special: map[int32]bool{}, addedText: map[int32]string{},
		normalize: func(_ *allowance, s string) (string, error) { return s, nil },
	}
	var vocabulary map[string]int32
	if m.Type != "Unigram" {
		if err := json.Unmarshal(m.Vocab, &vocabulary); err != nil || len(vocabulary) == 0 {
			return nil, errors.New("the model has no vocabulary: want an object of tokens and their numbers")
		}
	}
	for token, id := range vocabulary {
		if id < 0 {
			return nil, fmt.Errorf("the token %q has the number %d", token, id)
		}
		t.size = max(t.size, int(id)+1)
	}
	if err := t.readAdded(m.Type == "Unigram"); err != nil {
		return nil, err
	}
	var err error
	switch {
	case m.Type == "Unigram":
		return t, t.parseUnigram(contents)
	case m.Type == "BPE":
		if contents, err = t.readBPE(&file, vocabulary, contents); err != nil {
			return nil, err
		}
	case file.PreTokenizer == nil || file.PreTokenizer.Type != "BertPreTokenizer" ||
		file.Normalizer != nil && file.Normalizer.Type != "BertNormalizer":
		return nil, errors.New("a WordPiece model without BERT's normalizer and pre-tokenizer")
	}
	if t.lib, err = hftokenizer.NewFromContent(&api.Config{}, contents); err != nil {
		return nil, err
	}
	return t, t.lib.With(api.EncodeOptions{})
}

// readAdded checks the added tokens and sorts them, the longest first. Only Unigram models may strip spaces at them.
func (t *Tokenizer) readAdded(strip bool) error {
	for _, a := range t.added {
		switch {
		case a.Content == "" || a.ID < 0 || a.ID > 1<<30:
			return fmt.Errorf("the added token %q has the number %d", a.Content, a.ID)
		case a.SingleWord, !strip && (a.Lstrip || a.Rstrip):
			return fmt.Errorf("the added token %q has lstrip, rstrip or single_word, which are not supported", a.Content)
		}
		t.size = max(t.size, a.ID+1)
		t.special[int32(a.ID)], t.addedText[int32(a.ID)] = a.Special, a.Content
	}
	slices.SortStableFunc(t.added, func(a, b addedToken) int { return len(b.Content) - len(a.Content) })
	return nil
}

// readBPE reads a BPE model of bytes. It returns the contents for the library, which gets one word at a time, of which
// the bytes are mapped to letters, and only merges.
func (t *Tokenizer) readBPE(file *tokenizerFile, vocabulary map[string]int32, contents []byte) ([]byte, error) {
	m := &file.Model
	switch {
	case m.Dropout != nil && *m.Dropout > 0:
		return nil, errors.New("a model with dropout, which gives other tokens every time")
	case m.Prefix != nil && *m.Prefix != "" || m.Suffix != nil && *m.Suffix != "" || m.ByteFallback:
		return nil, errors.New("a BPE model with a prefix or suffix of subwords, or with byte_fallback: " +
			"supported is BPE of bytes")
	}
	for b, letter := range letters {
		if _, ok := vocabulary[string(letter)]; !ok {
			return nil, fmt.Errorf("the vocabulary lacks the byte %#04x: want all 256, so that every text has tokens", b)
		}
	}
	if m.IgnoreMerges {
		t.vocabulary = vocabulary
	}
	if err := t.setByteLevel(file.Normalizer, file.PreTokenizer); err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(contents, &fields); err != nil {
		return nil, err
	}
	fields["normalizer"], fields["pre_tokenizer"] = json.RawMessage("null"), json.RawMessage("null")
	return json.Marshal(fields)
}

// setByteLevel reads the normalizer and the pre-tokenizer of a BPE model of bytes.
func (t *Tokenizer) setByteLevel(normalizer, pre *step) error {
	t.byteLevel = true
	if normalizer != nil {
		steps := []step{*normalizer}
		if normalizer.Type == "Sequence" {
			steps = normalizer.Normalizers
		}
		for _, s := range steps {
			form, ok := forms[s.Type]
			if !ok {
				return fmt.Errorf("a BPE model with the normalizer %q: supported are NFC, NFD, NFKC and NFKD", s.Type)
			}
			before := t.normalize
			t.normalize = func(a *allowance, s string) (string, error) {
				s, err := before(a, s)
				return form.String(s), err
			}
		}
	}
	steps := []step{}
	if pre != nil {
		steps = []step{*pre}
		if pre.Type == "Sequence" {
			steps = pre.PreTokenizers
		}
	}
	for i, s := range steps {
		switch {
		case s.Type == "ByteLevel" && i == len(steps)-1 && (!s.AddPrefixSpace || i == 0):
			t.prefix = s.AddPrefixSpace
			if s.UseRegex == nil || *s.UseRegex {
				t.splits = append(t.splits, split{at: mustCompile(gpt2Pattern)})
			}
			return nil
		case s.Type == "Split" && (s.Behavior == "Isolated" || s.Behavior == "Removed"):
			expression := s.Pattern.Regex
			if expression == "" {
				expression = regexp2.Escape(s.Pattern.String)
			}
			at, err := compile(expression)
			if err != nil || expression == "" {
				return fmt.Errorf("the pattern %q of the pre-tokenizer: %w", expression, err)
			}
			t.splits = append(t.splits, split{at, s.Behavior == "Removed", s.Invert})
		default:
			return fmt.Errorf("a BPE model with the pre-tokenizer %q %s: supported are Split (Isolated, Removed), then "+
				"ByteLevel", s.Type, s.Behavior)
		}
	}
	return errors.New("a BPE model without the pre-tokenizer ByteLevel: supported is BPE of bytes")
}

// Size implements [data.Tokenizer]: it is the largest token plus 1, added tokens included.
func (t *Tokenizer) Size() int { return t.size }

// Token returns the number of the added token with this text, such as "<|endoftext|>", and whether there is one.
func (t *Tokenizer) Token(text string) (int32, bool) {
	for _, a := range t.added {
		if a.Content == text {
			return int32(a.ID), true
		}
	}
	return 0, false
}

// Encode implements [data.Tokenizer]. Added tokens in the text, such as <|endoftext|>, are found. It adds none. It
// returns an error if the expressions of the file take longer than a second, and 20 µs for each byte of the text.
func (t *Tokenizer) Encode(text string) ([]int32, error) {
	if !t.byteLevel && t.unigram == nil {
		return narrow(nil, t.lib.Encode(text)), nil
	}
	var tokens []int32
	var err error
	a := allow(text)
	next := slices.Repeat([]int{-1}, len(t.added)) // where each is next in the text
	for at := 0; at < len(text); {
		first := -1
		for i, a := range t.added { // the first in the text; of several there, the longest
			if next[i] < at {
				next[i] = len(text)
				if k := strings.Index(text[at:], a.Content); k >= 0 {
					next[i] = at + k
				}
			}
			if next[i] < len(text) && (first < 0 || next[i] < next[first]) {
				first = i
			}
		}
		if first < 0 {
			return t.encode(a, tokens, text[at:], at == 0)
		}
		added := t.added[first]
		before, after := text[at:next[first]], text[next[first]+len(added.Content):]
		if added.Lstrip {
			before = strings.TrimRightFunc(before, unicode.IsSpace)
		}
		if added.Rstrip {
			after = strings.TrimLeftFunc(after, unicode.IsSpace)
		}
		if tokens, err = t.encode(a, tokens, before, at == 0); err != nil {
			return nil, err
		}
		tokens = append(tokens, int32(added.ID))
		at = len(text) - len(after)
	}
	return tokens, nil
}

// encode appends the tokens of a text without added tokens. begins reports whether no other text is before it.
func (t *Tokenizer) encode(a *allowance, tokens []int32, text string, begins bool) ([]int32, error) {
	if text == "" {
		return tokens, nil
	}
	raw := text
	text, err := t.normalize(a, text)
	if err != nil {
		return nil, err
	}
	if u := t.unigram; u != nil {
		if text == "" {
			return tokens, nil
		}
		begins = begins && !(u.strips && strings.TrimLeftFunc(raw, unicode.IsSpace) != raw)
		for _, w := range u.words(text, begins) {
			tokens = append(tokens, t.word(w)...)
		}
		return tokens, nil
	}
	if t.prefix && !strings.HasPrefix(text, " ") {
		text = " " + text
	}
	words := []string{text}
	for _, s := range t.splits {
		var parts []string
		for _, w := range words {
			if parts, err = s.apply(a, parts, w); err != nil {
				return nil, err
			}
		}
		words = parts
	}
	for _, w := range words {
		tokens = append(tokens, t.word(w)...)
	}
	return tokens, nil
}

// apply appends the pieces of a text.
func (s split) apply(a *allowance, parts []string, text string) ([]string, error) {
	add := func(part string, delimiter bool) {
		if part != "" && !(delimiter && s.remove) {
			parts = append(parts, part)
		}
	}
	runes := []rune(text) // expressions count in these
	end := 0
	err := s.at.each(a, runes, func(from, to int) {
		add(string(runes[end:from]), s.invert)
		add(string(runes[from:to]), !s.invert)
		end = to
	})
	add(string(runes[end:]), s.invert)
	return parts, err
}

// word returns the tokens of a word, which no other is merged with.
func (t *Tokenizer) word(w string) []int32 {
	if tokens, ok := t.words.Load(w); ok {
		return tokens.([]int32)
	}
	tokens := t.tokensOf(w)
	if len(w) > wordMax {
		return tokens
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count < wordsMax {
		t.words.Store(strings.Clone(w), tokens)
		t.count++
	}
	return tokens
}

func (t *Tokenizer) tokensOf(w string) []int32 {
	if t.unigram != nil {
		return t.unigram.word(w)
	}
	var mapped strings.Builder
	for i := range len(w) {
		mapped.WriteRune(letters[w[i]])
	}
	if id, ok := t.vocabulary[mapped.String()]; ok {
		return []int32{id}
	}
	return narrow(nil, t.lib.Encode(mapped.String()))
}

// Decode implements [data.Tokenizer]. It drops special tokens, and numbers that are not tokens. WordPiece joins words
// by single spaces.
func (t *Tokenizer) Decode(tokens []int32) string {
	if t.unigram != nil {
		return t.unigram.decode(t, tokens)
	}
	wide := make([]int, 0, len(tokens))
	for _, token := range tokens {
		if !t.special[token] && token >= 0 && int(token) < t.size {
			wide = append(wide, int(token))
		}
	}
	return t.lib.Decode(wide)
}

func narrow(dst []int32, ids []int) []int32 {
	for _, id := range ids {
		dst = append(dst, int32(id))
	}
	return dst
}

// letters are the letters for bytes in vocabularies of bytes: printable characters map to themselves, the others
// follow from U+0100.
var letters = func() (l [256]rune) {
	next := rune(256)
	for b := range rune(256) {
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			l[b] = b
		} else {
			l[b] = next
			next++
		}
	}
	return l
}()
