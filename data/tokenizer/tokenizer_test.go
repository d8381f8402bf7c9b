package tokenizer_test

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/tokenizer"
)

var _ data.Tokenizer = (*tokenizer.Tokenizer)(nil)

// TestHuggingFace compares tokens and decoded texts with those of Hugging Face's library (testdata/make.py).
func TestHuggingFace(t *testing.T) {
	for _, name := range []string{"gpt2", "llama3", "prefix", "bert", "unigram", "t5", "albert", "first", "fallback"} {
		t.Run(name, func(t *testing.T) {
			tok, err := tokenizer.Load("testdata/" + name + ".json")
			if err != nil {
				t.Fatal(err)
			}
			contents, err := os.ReadFile("testdata/" + name + ".want.json")
			if err != nil {
				t.Fatal(err)
			}
			var want struct {
				Size  int
				Texts []struct {
					Text, Decoded string
					IDs           []int32
				}
			}
			if err := json.Unmarshal(contents, &want); err != nil {
				t.Fatal(err)
			}
			if tok.Size() != want.Size {
				t.Errorf("size %d, want %d", tok.Size(), want.Size)
			}
			for range 2 { // the second time the words are kept
				for _, c := range want.Texts {
					got := encode(t, tok, c.Text)
					if !slices.Equal(got, c.IDs) {
						t.Errorf("%q: got %v, want %v", c.Text, got, c.IDs)
					}
					if text := tok.Decode(c.IDs); text != c.Decoded {
						t.Errorf("%q: decoded %q, want %q", c.Text, text, c.Decoded)
					}
				}
			}
		})
	}
}

func encode(t *testing.T, tok *tokenizer.Tokenizer, text string) []int32 {
	t.Helper()
	tokens, err := tok.Encode(text)
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// TestHostileExpressions checks that expressions that try exponentially many ways end with an error that names them.
func TestHostileExpressions(t *testing.T) {
	for _, c := range []struct{ name, from, to string }{
		{
			"gpt2", `"pre_tokenizer":{"type":"ByteLevel"`,
			`"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","behavior":"Isolated",` +
				`"pattern":{"Regex":"(a+)+b"}},{"type":"ByteLevel"}]`,
		},
		{
			"t5", `"normalizer":`, `"normalizer":{"type":"Replace","pattern":{"Regex":"(a+)+b"},"content":"c"},"was":`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			contents, err := os.ReadFile("testdata/" + c.name + ".json")
			if err != nil {
				t.Fatal(err)
			}
			var compact bytes.Buffer
			if err := json.Compact(&compact, contents); err != nil {
				t.Fatal(err)
			}
			contents = []byte(strings.Replace(compact.String(), c.from, c.to, 1))
			tok, err := tokenizer.Parse(contents) // a match that ends may take the usual time
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tok.Encode("aab"); err != nil {
				t.Error(err)
			}
			tokenizer.SetTextMax(t, 100*time.Millisecond)
			if tok, err = tokenizer.Parse(contents); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			_, err = tok.Encode(strings.Repeat("a", 60))
			if took := time.Since(began); took > time.Minute {
				t.Errorf("it took %v", took)
			}
			if err == nil || !strings.Contains(err.Error(), `the expression "(a+)+b" does not find its matches in a text within 101.2ms`) {
				t.Errorf("got %v", err)
			}
			// The limit is of the whole text, not of a match: each of these takes some ms.
			hard := strings.Repeat(strings.Repeat("a", 16)+" ", 3000)
			if _, err = tok.Encode(hard); err == nil || !strings.Contains(err.Error(), `the expression "(a+)+b" does not`) {
				t.Errorf("a long text: %v", err)
			}
		})
	}
}

// TestAddedTokens compares Encode with a search from each place of a text, for added tokens that overlap.
func TestAddedTokens(t *testing.T) {
	contents, err := os.ReadFile("testdata/gpt2.json")
	if err != nil {
		t.Fatal(err)
	}
	plain, err := tokenizer.Parse(contents)
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(contents, &file); err != nil {
		t.Fatal(err)
	}
	added := []string{"<abc>", "<abc", "bc>", "<ab", "c>a"} // the longest first
	list := file["added_tokens"].([]any)
	for i, a := range added {
		list = append(list, map[string]any{"id": plain.Size() + i, "content": a})
	}
	file["added_tokens"] = list
	if contents, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Parse(contents)
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 3))
		text := ""
		for range r.IntN(30) {
			text += string("<abc>"[r.IntN(5)])
		}
		var want []int32
		from := 0
		for at := 0; at <= len(text); {
			i := slices.IndexFunc(added, func(a string) bool { return strings.HasPrefix(text[at:], a) })
			if i < 0 && at < len(text) {
				at++
				continue
			}
			want = append(want, encode(t, plain, text[from:at])...)
			if i < 0 {
				break
			}
			want = append(want, int32(plain.Size()+i))
			at += len(added[i])
			from = at
		}
		if got := encode(t, tok, text); !slices.Equal(got, want) {
			t.Errorf("%q: got %v, want %v", text, got, want)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	tok, err := tokenizer.Load("testdata/gpt2.json")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("the people said, that's 12 words  and more\n", 20)
	want := encode(t, tok, text)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if got := encode(t, tok, text); !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
	all.Wait()
	if id, ok := tok.Token("<|endoftext|>"); !ok || id != 0 {
		t.Errorf("the end of text is token %d, %t", id, ok)
	}
}

func TestUnsupported(t *testing.T) {
	read := func(name string) string {
		b, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	gpt2, unigram := read("gpt2.json"), read("unigram.json")
	for _, c := range []struct{ name, contents, want string }{
		{"word level", `{"model":{"type":"WordLevel"}}`, `type "WordLevel"`},
		{"empty unigram", `{"model":{"type":"Unigram","unk_id":0,"vocab":[]}}`, "no vocabulary"},
		{"unigram's unk_id", strings.Replace(unigram, `"unk_id":0`, `"unk_id":999`, 1), "unk_id 999"},
		{"unigram without unk_id", strings.Replace(unigram, `"unk_id":0`, `"unk_id":null`, 1), "no unk_id"},
		{"unigram's bytes", strings.Replace(unigram, `"byte_fallback":false`, `"byte_fallback":true`, 1), "lacks <0x00>"},
		{
			"unigram's pre-tokenizer", strings.Replace(unigram, `"pre_tokenizer":{"type":"Metaspace"`,
				`"pre_tokenizer":{"type":"Whitespace"`, 1), `the pre-tokenizer "Whitespace"`,
		},
		{
			"unigram's normalizer", strings.Replace(unigram, `"normalizer":null`, `"normalizer":{"type":"Nmt"}`, 1),
			`the normalizer "Nmt"`,
		},
		{
			"unigram's table", strings.Replace(unigram, `"normalizer":null`,
				`"normalizer":{"type":"Precompiled","precompiled_charsmap":"/////w=="}`, 1), "precompiled_charsmap has 4 bytes",
		},
		{"not JSON", "hello", "not a tokenizer.json"},
		{"no vocabulary", `{"model":{"type":"BPE"}}`, "no vocabulary"},
		{"a byte", `{"model":{"type":"BPE","vocab":{"a":0}}}`, "lacks the byte 0x00"},
		{
			"no pre-tokenizer", strings.Replace(gpt2, `"pre_tokenizer":{`, `"other":{`, 1),
			"without the pre-tokenizer ByteLevel",
		},
		{"lstrip", strings.Replace(gpt2, `"lstrip":false`, `"lstrip":true`, 1), "lstrip"},
		{"dropout", strings.Replace(gpt2, `"dropout":null`, `"dropout":0.1`, 1), "dropout"},
		{"normalizer", strings.Replace(gpt2, `"normalizer":null`, `"normalizer":{"type":"Lowercase"}`, 1), `"Lowercase"`},
		{
			"pattern", strings.Replace(gpt2, `"pre_tokenizer":{"type":"ByteLevel"`,
				`"pre_tokenizer":{"type":"Split","behavior":"Isolated","pattern":{"Regex":"("}`, 1),
			`the pattern "("`,
		},
	} {
		if _, err := tokenizer.Parse([]byte(c.contents)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q in it", c.name, err, c.want)
		}
	}
	if _, err := tokenizer.Load("testdata/none.json"); err == nil || !strings.Contains(err.Error(), "none.json") {
		t.Errorf("a missing file: %v", err)
	}
	wrong := filepath.Join(t.TempDir(), "wrong.json")
	if err := os.WriteFile(wrong, []byte(`{"model":{"type":"X"}}`), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := tokenizer.Load(wrong); err == nil || !strings.Contains(err.Error(), "wrong.json: a model") {
		t.Errorf("got %v", err)
	}
}

// FuzzParse checks that no file and no text make the package panic, and that tokens are in the vocabulary.
func FuzzParse(f *testing.F) {
	for _, name := range []string{"gpt2", "bert", "t5", "fallback"} {
		contents, err := os.ReadFile("testdata/" + name + ".json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(contents, "the people's  word\n")
	}
	tokenizer.SetTextMax(f, 200*time.Millisecond)
	f.Fuzz(func(t *testing.T, contents []byte, text string) {
		tok, err := tokenizer.Parse(contents)
		if err != nil {
			return
		}
		tokens, err := tok.Encode(text)
		if err != nil && !strings.Contains(err.Error(), "does not find its matches") {
			t.Error(err)
		}
		for _, token := range tokens {
			if token < 0 || int(token) >= tok.Size() {
				t.Errorf("token %d of %d", token, tok.Size())
			}
		}
		tok.Decode([]int32{-1, 0, 1, int32(tok.Size())})
	})
}
