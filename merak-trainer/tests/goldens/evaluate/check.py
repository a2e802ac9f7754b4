"""Evaluates tiny models of transformers by `merak evaluate`, from their own folders, tokenizers and
data.

    python check.py MERAK

MERAK is the command. The losses of labelled texts and pairs of texts (BERT), of pairs of sequences
(T5), of sequences with padding before their tokens (GPT-2, Llama) and of images of bytes (ViT) must
equal those of transformers, on one rank and on several. Ran with torch 2.13.0, transformers 5.23.0
and tokenizers 0.23.3.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

SAMPLES, VALIDATION = 40, 0.4
HELD_OUT = slice(SAMPLES - int(SAMPLES * VALIDATION), SAMPLES)
WORDS = "every rank waits for its peer and none of them waits for ever , which is the law of this world .".split()
RANKS = ["", "--tp 2", "--pp 2", "--dp 2 --tp 2 --pp 2"]


def model(folder, architecture, **fields):
    builder = getattr(transformers, architecture)
    made = builder(builder.config_class(architectures=[architecture], **fields)).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder)
    return made


def tokenizer(folder, special):
    made = Tokenizer(models.WordLevel(unk_token=special[2]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator([WORDS], trainers.WordLevelTrainer(special_tokens=special))
    made.save(str(folder / "tokenizer.json"))
    return made


def phrase(most):
    return " ".join(random.choices(WORDS, k=random.randint(1, most)))


def bert(folder):
    """Texts and pairs of texts, some too long for a sample, with classes by name."""
    words = tokenizer(folder, ["[PAD]", "[CLS]", "[UNK]", "[SEP]"])
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 1))
    words.save(str(folder / "tokenizer.json"))
    names = {"low": 0, "mid": 1, "high": 2}
    made = model(
        folder, "BertForSequenceClassification", vocab_size=words.get_vocab_size(), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=48, max_position_embeddings=24, label2id=names,
        id2label={index: name for name, index in names.items()},
    )
    records = [
        {"text": phrase(80), "text_pair": phrase(60) if i % 3 else None, "label": random.choice(list(names))}
        for i in range(SAMPLES)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    words.enable_truncation(24)
    losses = []
    for record in records[HELD_OUT]:
        text = words.encode(record["text"], record["text_pair"])
        ids, types = torch.tensor([text.ids]), torch.tensor([text.type_ids])
        losses.append(made(input_ids=ids, token_type_ids=types, labels=torch.tensor([names[record["label"]]])).loss)
    keys = f"--data.format jsonl --data.path {folder}/data.jsonl --data.tokenizer {folder}/tokenizer.json"
    return sum(losses) / len(losses), keys


def t5(folder):
    words = tokenizer(folder, ["<pad>", "</s>", "<unk>"])
    made = model(
        folder, "T5ForConditionalGeneration", vocab_size=words.get_vocab_size(), d_model=32, d_kv=8, d_ff=48,
        num_layers=2, num_heads=4, decoder_start_token_id=0,
    )
    records = [{"source": phrase(30), "target": phrase(20)} for _ in range(SAMPLES)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    total, count = 0.0, 0
    for record in records[HELD_OUT]:
        source, target = (words.encode(record[name]).ids for name in ("source", "target"))
        source, target = torch.tensor([source[:15] + [1]]), torch.tensor([target[:9] + [1]])
        total += made(input_ids=source, labels=target).loss * target.numel()
        count += target.numel()
    keys = f"--data.format jsonl --data.path {folder}/data.jsonl --data.tokenizer {folder}/tokenizer.json"
    return total / count, keys + " --seq_length 16,10"


def padded_before(folder, architecture, **fields):
    made = model(folder, architecture, vocab_size=90, **fields)
    first = torch.randint(0, 6, (SAMPLES, 1))
    mask = (torch.arange(12) >= first).long()
    ids = torch.randint(0, 90, mask.shape) * mask
    save_file({"input_ids": ids, "attention_mask": mask}, folder / "data.safetensors")
    ids, mask = ids[HELD_OUT], mask[HELD_OUT]
    logits = made(input_ids=ids, attention_mask=mask).logits[:, :-1]
    labels = torch.where((mask[:, 1:] * mask[:, :-1]).bool(), ids[:, 1:], -100)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, f"--data.format tensors --data.path {folder}/data.safetensors"


def gpt2(folder):
    return padded_before(folder, "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=16)


def llama(folder):
    return padded_before(
        folder, "LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )


def vit(folder):
    made = model(
        folder, "ViTForImageClassification", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, image_size=[12, 10], patch_size=[4, 5], num_labels=4,
    )
    pixels, labels = torch.randint(0, 256, (SAMPLES, 3, 12, 10), dtype=torch.uint8), torch.randint(0, 4, (SAMPLES,))
    save_file({"pixel_values": pixels, "labels": labels}, folder / "data.safetensors")
    values = pixels[HELD_OUT].float() / 127.5 - 1.0
    loss = made(pixel_values=values, labels=labels[HELD_OUT]).loss
    return loss, f"--data.format tensors --data.path {folder}/data.safetensors"


def evaluated(merak, folder, keys):
    (folder / "merak.toml").write_text(f'[model]\nhf_dir = "{folder}"\n[data]\nvalidation_fraction = {VALIDATION}\n')
    command = [merak, "evaluate", str(folder / "merak.toml"), str(folder), "--json", *keys.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["eval_loss"]


for case in (bert, t5, gpt2, llama, vit):
    torch.manual_seed(7)
    random.seed(7)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        expected, keys = case(pathlib.Path(folder))
        for ranks in RANKS:
            own = evaluated(sys.argv[1], pathlib.Path(folder), f"{keys} {ranks}")
            assert abs(own / expected.item() - 1.0) < 1e-5, (case.__name__, ranks, own, expected.item())
    print(f"{case.__name__}: {own} on every topology, {expected.item()} in transformers")
