"""Where transformers ends texts because of `stop_strings`.

Run with transformers 5.23 and tokenizers 0.22 or later: `python make.py`. Beside this file come
tokenizer.json, a byte-level BPE of 320 tokens, and stops.json: sequences of tokens, strings, and
for each sequence and string the lengths at which `StopStringCriteria` says that the text has come
to its end. The sequences are the tokens of texts, and tokens at random, which begin and end strings
anywhere.
"""

import json
import pathlib
import random

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

here = pathlib.Path(__file__).resolve().parent
CORPUS = [
    "The end of a text is where the end was told to be.\n\nUser: hello!\nAssistant: hello there, hello hello.",
    "fn main() {\n    println!(\"the end\");\n}\n\n```rust\nlet x = 1;\n```\n### End ### Stop. stop! STOP",
    "aaaa aaaaaa aa abab ababab ab, one two three. One. Two. Three.\n\n\n\n",
] * 4
STRINGS = [
    "end", "the end", " end", "END", "\n\n", "\n", ".", "User:", "```", "###", "aa", "aaa", "aaaa", "ab", "abab",
    "hello hello", "o t", "there, he", "e", " ", "}\n", "println!(\"the end\");\n}", "never there", ". ", "\n\n\n",
]


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(here / "tokenizer.json"))
    fast = PreTrainedTokenizerFast(tokenizer_file=str(here / "tokenizer.json"), eos_token="<|endoftext|>")

    rng = random.Random(1234)
    text_tokens = sorted({token for text in CORPUS for token in tokenizer.encode(text).ids})
    sequences = [tokenizer.encode(text).ids[:48] for text in CORPUS[:3]]
    sequences += [rng.choices(text_tokens, k=24) for _ in range(12)]
    # Few tokens, so that strings overlap themselves.
    few = [tokenizer.token_to_id(token) for token in ("a", "b", "aa", "ab", "Ġ", "Ċ", ".", "e", "end") if
           tokenizer.token_to_id(token) is not None]
    sequences += [rng.choices(few, k=24) for _ in range(8)]
    sequences = [[int(token) for token in sequence] for sequence in sequences]

    ends = []
    for string in STRINGS:
        stops = StopStringCriteria(tokenizer=fast, stop_strings=[string])
        found = []
        for sequence in sequences:
            lengths = range(1, len(sequence) + 1)
            found.append([n for n in lengths if bool(stops(torch.tensor([sequence[:n]]), None)[0])])
        ends.append(found)
    result = {
        "versions": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__,
                     "torch": torch.__version__},
        "sequences": sequences,
        "strings": STRINGS,
        "ends": ends,
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    (here / "stops.json").write_text("{\n" + lines + "\n}\n")
    print(sum(len(found) for string in ends for found in string), "ends")


main()
