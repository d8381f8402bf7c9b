"""Makes the tokenizers of the tests, and what Hugging Face's library gives for some texts.

    pip install tokenizers==0.23.3 && python3 make.py
"""
import json
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers, normalizers, AddedToken, Regex

# A text with runs of spaces, numbers, contractions, other scripts and invalid merges over words.
WORDS = """the of and a to in is you that it he was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will up other about out
many then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part""".split()


def corpus():
    state = 1
    for line in range(3000):
        parts = []
        for i in range(12):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            w = WORDS[(state >> 33) % len(WORDS)]
            k = (state >> 20) % 16
            parts.append({0: w.capitalize() + ",", 1: w + "'s", 2: str(state >> 44), 3: "    " + w, 4: w + "!",
                          5: "don't", 6: "na\u00efve", 7: w + "\n\n\t" + w, 8: "\u65e5\u672c"}.get(k, w))
        yield " ".join(parts) + "\n"


TEXTS = [
    "Hello, world! It's 2026; don't   panic\n\n  indent\ttab 12345 na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d "
    "\u65e5\u672c\u8a9e \U0001f642 x=1", " leading and trailing  ", "", "a\r\nb  ", "    four spaces\n\n\n    again",
    "1234567890 12 3", "end<|endoftext|>begin <|endoftext|>", "the people's WATER'S we'll I'M", "e\u0301 \u00e9 \ufb01",
    "\u00a0no-break\u3000wide\u0085next", "".join(line for line, _ in zip(corpus(), range(40))),
]


def save(name, t, trainer):
    t.train_from_iterator(corpus(), trainer)
    t.save(name + ".json", pretty=False)
    write(name, t)


def write(name, t):
    out = []
    for text in TEXTS:
        ids = t.encode(text, add_special_tokens=False).ids
        out.append({"text": text, "ids": ids, "decoded": t.decode(ids)})
    with open(name + ".want.json", "w") as f:
        json.dump({"size": max(t.get_vocab().values()) + 1, "texts": out}, f)


alphabet = pre_tokenizers.ByteLevel.alphabet()
t = Tokenizer(models.BPE())
t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
save("gpt2", t, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]))

t = Tokenizer(models.BPE(ignore_merges=True))
t.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
t.decoder, t.normalizer = decoders.ByteLevel(), normalizers.NFC()
save("llama3", t, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]))

t = Tokenizer(models.BPE())
t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
save("prefix", t, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))

t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
t.decoder = decoders.WordPiece(cleanup=False)
save("bert", t, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[PAD]"]))

TEXTS += ["a <extra_id_0>  b<extra_id_1>c", "``quoted'' CAF\u00c9  x", "\ufb01ne\u3000wide e\u0301 A\u030a \u2460",
          "\u2581marks \u2581\u2581 here", "\u65e5\u672c\u8a9e\u8a9e the \U0001f642\U0001f642", "   ", "\n"]


def unigram(name, normalizer, spaces, scheme="always", split=True, added=(), fallback=False):
    t = Tokenizer(models.Unigram())
    meta = dict(prepend_scheme=scheme, split=split)
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(**meta), decoders.Metaspace(prepend_scheme=scheme, split=split)
    if spaces:
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**meta)])
    special = ["<unk>"] + (["<0x%02X>" % b for b in range(256)] if fallback else [])
    t.train_from_iterator(corpus(), trainers.UnigramTrainer(
        vocab_size=300 + len(special), special_tokens=special, unk_token="<unk>"))
    if fallback:
        j = json.loads(t.to_str())
        j["model"]["byte_fallback"], j["added_tokens"] = True, j["added_tokens"][:1]
        t = Tokenizer.from_str(json.dumps(j))
        t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme, split=split)])
    t.add_special_tokens(list(added))
    t.save(name + ".json", pretty=False)
    write(name, t)


# SentencePiece makes the table of replacements: python3 -m pip install sentencepiece==0.2.3 protobuf
def charsmap():
    import io
    import tempfile
    import sentencepiece as spm
    from sentencepiece import sentencepiece_model_pb2
    rules = {"\ufb01": "fi", "\u3000": " ", "\u00a0": " ", "e\u0301": "\u00e9", "\u2460": "1", "\u0085": "",
             "A\u030a": "\u00c5"}
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as f:
        for k, v in rules.items():
            f.write("%s\t%s\n" % (" ".join("%X" % ord(c) for c in k), " ".join("%X" % ord(c) for c in v)))
        f.flush()
        out = io.BytesIO()
        spm.SentencePieceTrainer.train(sentence_iterator=corpus(), model_writer=out, vocab_size=100,
                                       normalization_rule_tsv=f.name, minloglevel=2)
    return sentencepiece_model_pb2.ModelProto.FromString(out.getvalue()).normalizer_spec.precompiled_charsmap


table = charsmap()
N = normalizers
unigram("unigram", None, False)
unigram("t5", N.Precompiled(table), True, added=[
    AddedToken("<extra_id_0>", lstrip=True, rstrip=True), AddedToken("<extra_id_1>", lstrip=True)])
unigram("albert", N.Sequence([N.Replace("``", '"'), N.Replace("''", '"'), N.NFKD(), N.StripAccents(), N.Lowercase(),
                              N.Precompiled(table), N.Replace(Regex(" {2,}"), " ")]), True)
unigram("first", N.Sequence([N.Strip(), N.NFC()]), False, scheme="first", split=False)
unigram("fallback", None, False, scheme="never", fallback=True)
