# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer without merges, for models that know no language: any text round-trips, one token a byte.

Ids: the special tokens, the 256 bytes, then fillers `<i>` up to the vocabulary, so that every id the model can emit has
a text. The special tokens include the tags that reasoning and tool parsers look up by id.
"""

from __future__ import annotations

from .files import Folder

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IMAGE = "<image>"
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    IMAGE,
)
BOS, EOS = 1, 2  # ids of <|im_start|> and <|im_end|>
SMALLEST_VOCABULARY = len(SPECIAL) + len(TAGS) + 256

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte 0..255.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 up, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = [], 256
    for byte in range(256):
        alphabet.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return alphabet


def tokenizer_json(vocabulary: int) -> dict:
    """tokenizer.json for `vocabulary` ids; ValueError if they cannot hold the specials and the bytes."""
    if vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(f"vocabulary of {vocabulary}, want at least {SMALLEST_VOCABULARY}: tags and the 256 bytes")
    tokens = [*SPECIAL, *TAGS, *byte_alphabet()]
    tokens += [f"<{i}>" for i in range(len(tokens), vocabulary)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **flags, "special": i < len(SPECIAL)} for i, token in enumerate(SPECIAL + TAGS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }


def write_tokenizer(folder: Folder, vocabulary: int, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json; `context` is the model's length in tokens."""
    folder.add_json("tokenizer.json", tokenizer_json(vocabulary))
    folder.add_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "pad_token": SPECIAL[0],
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    folder.add_json("generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0})
