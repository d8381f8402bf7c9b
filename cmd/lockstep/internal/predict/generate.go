package predict

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
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
lockstep train --data text. It prints prompt and continuation as they come. The
model sees the last tokens, at most as many as it was trained on (--positions):
when these are full, it goes on with the last half of them. Keys and values of
earlier tokens stay where the engine computes, so that a token costs one
position.

The same command and seed give the same text on CPUs of one type. Other seeds
give other texts, unless the temperature is 0, which always takes the likeliest
token.`,
		Example: `  lockstep generate --from run1 --prompt "To be"
  lockstep generate --from run1 --prompt "To be" --tokens 500 --temperature 0.8 --top-k 40
  lockstep generate --from run1 --prompt "12+30=" --tokens 3 --temperature 0`,
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

func (o *generateFlags) run(ctx context.Context, out io.Writer) (err error) {
	r, err := o.from.load()
	if err != nil {
		return err
	}
	if r.flags.Data.Name != "text" {
		return fmt.Errorf("--from %s: a run of --model %s on --data %s: want one of --data text, which trains a GPT; for "+
			"classes of other data there is lockstep predict", o.from.dir, r.flags.Model, r.flags.Data.Name)
	}
	tokenizer, err := r.flags.Data.LoadTokenizer()
	if err != nil {
		return err
	}
	e, err := o.from.engine.Open(1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	gpt := setup.NewGPT(&r.flags.GPTFlags, tokenizer.Size())
	shape := gpt.Cache(r.flags.Positions)
	half := (shape.Positions + 1) / 2
	m := &gomlx.Model{Forward: gpt.Continue, Precision: gomlx.Precision(r.flags.Step.Precision)}
	step, err := r.predictorOf(ctx, e, m, shape.Inputs(1), 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, step.Close()) }()
	r.weights = nil // the engine has them
	block, err := step.ForInputs(ctx, shape.Inputs(half)...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, block.Close()) }()
	d, err := models.NewDecoder(shape, step, block, half)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	o.sampler.random = rand.New(rand.NewPCG(uint64(o.seed), 0))
	return o.generate(ctx, out, d, tokenizer, shape.Positions)
}

// generate prints the prompt and its continuation.
func (o *generateFlags) generate(ctx context.Context, out io.Writer, d *models.Decoder, tokenizer data.Tokenizer,
	positions int,
) error {
	tokens, err := tokenizer.Encode(o.prompt)
	if err != nil {
		return fmt.Errorf("--prompt: %w", err)
	}
	if len(tokens) == 0 {
		return fmt.Errorf("--prompt %q: the tokenizer of the run has no token for it: want another text", o.prompt)
	}
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
	_, err = io.WriteString(out, text.next(tokens, true)+"\n")
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
