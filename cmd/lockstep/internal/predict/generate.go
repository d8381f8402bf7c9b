package predict

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/training"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/tokenizer"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

// generateFlags are the flags of lockstep generate.
type generateFlags struct {
	from    savedFlags
	prompt  string
	tokens  int
	sampler sampler
	seed    int64
}

// NewGenerate returns lockstep generate.
func NewGenerate() *cobra.Command {
	var o generateFlags
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Continue a text with a trained GPT",
		Long: `Generate continues a prompt, token by token, with the GPT of a run of
lockstep train --data text, or with a GPT-2 or Llama of Hugging Face: a folder
with config.json, tokenizer.json and safetensors. It prints prompt and
continuation as they come. The model sees the last tokens, at most as many as it
was trained on: when these are full, it goes on with the last half of them. Keys
and values of earlier tokens stay where the engine computes, so that a token
costs one position.

The same command and seed give the same text on CPUs of one type. Other seeds
give other texts, unless the temperature is 0, which always takes the likeliest
token.`,
		Example: `  lockstep generate --from run1 --prompt "To be"
  lockstep generate --from run1 --prompt "To be" --tokens 500 --temperature 0.8 --top-k 40
  lockstep generate --from run1 --prompt "12+30=" --tokens 3 --temperature 0
  lockstep generate --from gpt2 --prompt "To be" --top-k 40`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.prompt == "" {
				return cli.Usagef("--prompt is empty: want at least one character, such as a line break")
			}
			return cli.Interruptible(cmd, o.run)
		},
	}
	f := cmd.Flags()
	o.from.add(f)
	f.StringVar(&o.prompt, "prompt", "\n", "the text to continue (default a line break)")
	f.Lookup("prompt").DefValue = ""
	f.IntVar(&o.tokens, "tokens", 200, "number of tokens to generate; of a run without --tokenizer, bytes")
	f.Float64Var(&o.sampler.temperature, "temperature", 0.8, "divides the logits: below 1 likely tokens become likelier; "+
		"0 always takes the likeliest")
	f.IntVar(&o.sampler.topK, "top-k", 0, "draw from so many of the likeliest tokens (default all)")
	f.Float64Var(&o.sampler.topP, "top-p", 1, "draw from the fewest likeliest tokens that together have this probability")
	f.Int64Var(&o.seed, "seed", 1, "seed of the draws")
	o.from.engine.Add(f)
	cli.Limit(f, "[1,)", "tokens")
	cli.Limit(f, "[0,)", "temperature")
	cli.Limit(f, "[0,), 0 for all", "top-k")
	cli.Limit(f, "(0,1]", "top-p")
	return cmd
}

// language is a language model, with its weights and its tokenizer.
type language struct {
	run       *savedRun
	model     *gomlx.Model
	tokenizer data.Tokenizer
	positions int  // the longest sequence
	resizable bool // the cache can have fewer positions
	cache     func(positions int) models.CacheShape
}

// load reads a run of lockstep train, or a model of the library transformers.
func (o *generateFlags) load() (*language, error) {
	config := filepath.Join(o.from.dir, "config.json")
	if _, err := os.Stat(filepath.Join(o.from.dir, training.ConfigFile)); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(config); err == nil {
			return o.loadTransformers(config)
		}
	}
	r, err := o.from.load()
	if err != nil {
		return nil, err
	}
	if r.flags.Data.Name != "text" {
		return nil, fmt.Errorf("--from %s: a run of --model %s on --data %s: want one of --data text, which trains a GPT; "+
			"for classes of other data there is lockstep predict", o.from.dir, r.flags.Model, r.flags.Data.Name)
	}
	tokenizer, err := r.flags.Data.LoadTokenizer()
	if err != nil {
		return nil, err
	}
	gpt := setup.NewGPT(&r.flags.GPTFlags, tokenizer.Size())
	m := &gomlx.Model{Forward: gpt.Continue, Precision: gomlx.Precision(r.flags.Step.Precision)}
	return &language{run: r, model: m, tokenizer: tokenizer, positions: r.flags.Positions, cache: gpt.Cache}, nil
}

// loadTransformers reads a folder of save_pretrained, with a tokenizer.json.
func (o *generateFlags) loadTransformers(config string) (*language, error) {
	if err := o.from.engine.Check(); err != nil {
		return nil, err
	}
	m, err := models.LoadCausalLM(config)
	if err != nil {
		return nil, fmt.Errorf("--from %s: %w", o.from.dir, err)
	}
	t, err := tokenizer.Load(filepath.Join(o.from.dir, "tokenizer.json"))
	if err != nil {
		return nil, fmt.Errorf("--from %s: the tokenizer: %w", o.from.dir, err)
	}
	if t.Size() > m.Vocabulary {
		return nil, fmt.Errorf("--from %s: tokenizer.json has %d tokens, and the model in config.json %d: want no more than "+
			"the model has", o.from.dir, t.Size(), m.Vocabulary)
	}
	weights, err := train.LoadWeights(o.from.dir)
	if err != nil {
		return nil, fmt.Errorf("--from %s: %w", o.from.dir, err)
	}
	const prefix = "transformer." // which files of GPT-2 without a head lack
	if m.Type == "gpt2" && !slices.ContainsFunc(weights, func(w train.Weight) bool {
		return strings.HasPrefix(w.Name, prefix)
	}) {
		for i := range weights {
			weights[i].Name = prefix + weights[i].Name
		}
	}
	return &language{
		run:   &savedRun{from: o.from, config: config, source: o.from.dir, weights: weights},
		model: &gomlx.Model{Forward: m.Continue}, tokenizer: t, positions: m.Positions, resizable: true, cache: m.Cache,
	}, nil
}

func (o *generateFlags) run(ctx context.Context, out io.Writer) (err error) {
	l, err := o.load()
	if err != nil {
		return err
	}
	tokens, err := l.tokenizer.Encode(o.prompt)
	if err != nil {
		return fmt.Errorf("--prompt: %w", err)
	}
	if len(tokens) == 0 {
		return fmt.Errorf("--prompt %q: the tokenizer has no token for it: want another text", o.prompt)
	}
	inBlock := (l.positions + 1) / 2
	if n := len(tokens) + o.tokens; n <= l.positions { // the sequence never begins again
		inBlock = len(tokens)
		if l.resizable {
			l.positions = n
		}
	}
	e, err := o.from.engine.Open(1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	shape := l.cache(l.positions)
	step, err := l.run.predictorOf(ctx, e, l.model, shape.Inputs(1), 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, step.Close()) }()
	l.run.weights = nil // the engine has them
	block, err := step.ForInputs(ctx, shape.Inputs(inBlock)...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, block.Close()) }()
	d, err := models.NewDecoder(shape, step, block, inBlock)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	o.sampler.random = rand.New(rand.NewPCG(uint64(o.seed), 0))
	return o.generate(ctx, out, d, l.tokenizer, tokens, shape.Positions)
}

// generate prints the prompt, of which it has the tokens, and its continuation.
func (o *generateFlags) generate(ctx context.Context, out io.Writer, d *models.Decoder, tokenizer data.Tokenizer,
	tokens []int32, positions int,
) error {
	if _, err := io.WriteString(out, o.prompt); err != nil {
		return err
	}
	text := textStream{tokenizer: tokenizer, printed: len(tokens), from: max(0, len(tokens)-contextTokens)}
	unread := tokens[max(0, len(tokens)-positions):]
	for range o.tokens {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if d.Len()+len(unread) > positions {
			d.Reset()
			unread = tokens[len(tokens)-(positions+1)/2:]
		}
		logits, err := d.Append(ctx, unread...)
		if err != nil {
			return err
		}
		token, err := o.sampler.next(logits)
		if err != nil {
			return err
		}
		tokens = append(tokens, token)
		unread = tokens[len(tokens)-1:]
		if _, err := io.WriteString(out, text.next(tokens, false)); err != nil {
			return err
		}
	}
	_, err := io.WriteString(out, text.next(tokens, true)+"\n")
	return err
}

// contextTokens is the number of tokens before new ones that are decoded with them: the text of a token can depend on
// those before it, such as a space between words.
const contextTokens = 16

// textStream decodes tokens as they come.
type textStream struct {
	tokenizer data.Tokenizer
	from      int // the first token that is decoded
	printed   int // number of tokens whose text was returned
}

// next returns the text of the tokens since the last text. While that ends within a character, it returns "",
// unless these are the last tokens.
func (s *textStream) next(tokens []int32, last bool) string {
	before := s.tokenizer.Decode(tokens[s.from:s.printed])
	text, ok := strings.CutPrefix(s.tokenizer.Decode(tokens[s.from:]), before)
	if !ok || !last && endsWithin(text) && len(tokens)-s.printed < utf8.UTFMax {
		return ""
	}
	s.from, s.printed = s.printed, len(tokens)
	return text
}

// endsWithin reports whether text ends within a character.
func endsWithin(text string) bool {
	if strings.HasSuffix(text, string(utf8.RuneError)) {
		return true // decoders write it for bytes that are not a character
	}
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if tail := text[len(text)-n:]; utf8.RuneStart(tail[0]) {
			return !utf8.FullRuneInString(tail)
		}
	}
	return false
}
