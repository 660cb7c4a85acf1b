"""Tokenizers: bytes and tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.stream import encode
from hetero_pp.data.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer
from hetero_pp.data.tokens import prepare_tokens


def train_tokenizer(special: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the theme of these themes"] * 4, trainer)
    return tokenizer


def test_added_tokens_beyond_the_vocabulary_are_mentioned(tmp_path: Path) -> None:
    """The tokenizers library renumbers them, so that text would not have the ids of the file."""
    tokenizer = train_tokenizer(["</s>"])
    tokenizer.add_tokens(["<a>", "<b>"])
    path, size = tmp_path / "tokenizer.json", tokenizer.get_vocab_size()
    content = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(content))
    assert FileTokenizer(path).notes == ()
    for token in content["added_tokens"][1:]:
        token["id"] += 5000
    path.write_text(json.dumps(content))
    changed = FileTokenizer(path)
    assert changed.encode_batch(["<a>"])[0].tolist() != []
    assert changed.vocabulary == size
    assert changed.notes == (
        f"data.tokenizer: {path}: 2 of {size} tokens have other ids than in the file, because the "
        "ids in the file are not "
        f"in the order of its vocabulary: <a> {size + 4998} -> {size - 2}, <b> {size + 4999} -> {size - 1}",
    )
    corpus = tmp_path / "a.txt"
    corpus.write_text("the theme of <b> these themes")
    store = prepare_tokens(DataSettings(corpus=str(corpus), tokenizer=str(path), validation_share=0.2), tmp_path)
    assert size - 1 in [*store.train, *store.validation]
    assert store.notes == changed.notes


@given(st.text())
def test_bytes_give_the_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids.tolist()) == text.replace("\0", "")


def test_bytes_decode_anything() -> None:
    assert ByteTokenizer().decode([97, 0, 98, 300, 255]) == "ab\N{REPLACEMENT CHARACTER}"
    assert ByteTokenizer().vocabulary == 256


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_tokenizer_file(tmp_path: Path, as_folder: bool) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["<s>", "</s>"]).save(str(path))
    tokenizer = load_tokenizer(DataSettings(tokenizer=str(tmp_path if as_folder else path)))
    texts = ["the themes", "", "é ☃"]
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(row.tolist()) for row in ids] == texts
    assert tokenizer.separator == 1
    assert all(row.max(initial=0) < tokenizer.vocabulary for row in ids)
    assert len(ids[0]) < len(texts[0])


@pytest.mark.parametrize("name", ["</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]"])
def test_the_usual_separators_are_found(tmp_path: Path, name: str) -> None:
    train_tokenizer(["[PAD]", name]).save(str(tmp_path / "tokenizer.json"))
    assert FileTokenizer(tmp_path / "tokenizer.json").separator == 1


@pytest.mark.parametrize(
    ("config", "separator"),
    [
        ({"eos_token": "<end>", "bos_token": "<s>"}, 2),
        ({"eos_token": {"content": "<end>", "lstrip": False}}, 2),
        ({"bos_token": "<s>"}, 0),
        ({"eos_token": None, "bos_token": {"content": "<s>"}}, 0),
        ({"eos_token": "<unknown>"}, 1),
        ({}, 1),
    ],
)
def test_a_folder_names_its_separator(tmp_path: Path, config: dict[str, Any], separator: int) -> None:
    """As in tokenizer_config.json of Llama-2, it is a string or an object. `</s>` is one of the usual names."""
    train_tokenizer(["<s>", "</s>", "<end>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True} | config))
    assert load_tokenizer(DataSettings(tokenizer=str(tmp_path))).separator == separator


def test_a_sentencepiece_model_alone_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(ConfigError, match=r"expected a tokenizer\.json; `pip install transformers sent") as caught:
            load_tokenizer(DataSettings(tokenizer=str(path)))
        assert f"from_pretrained('{tmp_path}')" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    train_tokenizer(["</s>"]).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(DataSettings(tokenizer=str(tmp_path))).separator == 0


def test_a_tokenizer_without_an_end_of_text_gets_one_more_id(tmp_path: Path) -> None:
    trained = train_tokenizer([])
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.separator == trained.get_vocab_size() == tokenizer.vocabulary - 1
    (ids,) = tokenizer.encode_batch(["the"])
    assert tokenizer.decode([*ids.tolist(), tokenizer.separator]) == "the"


def test_nothing_is_cut_off_padded_or_added(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    trained = train_tokenizer(["<s>", "</s>"])
    trained.enable_truncation(4)
    trained.enable_padding(length=4)
    trained.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    short, long = tokenizer.encode_batch(["x", "x" * 50])
    assert len(short) == 1
    assert len(long) == 50


def test_text_that_spells_the_separator_is_not_one(tmp_path: Path) -> None:
    train_tokenizer(["<s>", "</s>"]).save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    (ids,) = tokenizer.encode_batch(["a</s>b"])
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids.tolist()) == "a</s>b"


def test_the_identity_follows_the_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, special in zip(paths, (["<s>"], ["<s>"], ["</s>"]), strict=True):
        train_tokenizer(special).save(str(path))
    a, b, c = (FileTokenizer(path).identity for path in paths)
    assert a == b != c
    assert ByteTokenizer().identity not in (a, c)


def test_a_missing_file(tmp_path: Path) -> None:
    for name in ("byte", str(tmp_path)):
        with pytest.raises(ConfigError, match=f"found `{name}`, expected `bytes` or a path to a tokenizer.json"):
            load_tokenizer(DataSettings(tokenizer=name))


def _rules(**more: Any) -> dict[str, Any]:
    rules = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    return {"version": "1.0", "added_tokens": [], **rules, "model": model} | more


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _nested(levels: int) -> dict[str, Any]:
    rule: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(levels):
        rule = {"type": "Sequence", "normalizers": [rule]}
    return rule


READABLE = r"expected a readable tokenizer\.json"
BROKEN = ["", "{", "{}", "[]", '{"model": {"type": "BPE"}}', "\xff", "[" * 100_000]


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        *((text, READABLE) for text in BROKEN),
        ("[]", "found a JSON list, expected an object"),
        (_rules(model=None), READABLE),
        (_rules(normalizer=_nested(20)), "more than 16 levels deep"),
        (_rules(pre_tokenizer=_split("(" * 3000 + "a" + ")" * 3000)), "found a rule with more than 100 groups"),
        (_rules(pre_tokenizer=_split("[" * 3000 + "a" + "]" * 3000)), "found a rule with more than 100 groups"),
        (_rules(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "the tokenizers library failed: "),
        (_rules(added_tokens=[7]), "added_tokens: found another type than a list of tokens"),
        (_rules(added_tokens={"a": 1}), "added_tokens: found another type than a list of tokens"),
        (_rules(added_tokens=[{"content": "a" * 1001, "id": 2}]), "added_tokens: found a text of 1,001 bytes"),
        (_rules(model={"type": "BPE", "continuing_subword_prefix": "#" * 1001}), "continuing_subword_prefix: found a"),
    ],
)
def test_a_broken_file_is_one_line_and_does_not_end_the_process(rules: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes((rules if isinstance(rules, str) else json.dumps(rules)).encode("latin-1"))
    with pytest.raises(ConfigError, match=told) as caught:
        load_tokenizer(DataSettings(tokenizer=str(path)))
    assert (caught.value.key, "\n" in str(caught.value)) == (("data", "tokenizer"), False)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_broken_tokenizer_config_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(_rules()))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json`, expected a JSON object") as caught:
        load_tokenizer(DataSettings(tokenizer=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_text_on_which_rules_fail_is_an_error_that_can_be_caught(tmp_path: Path) -> None:
    """If a regular expression needs too many attempts, the library panics, and Python gets no Exception."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(_rules(pre_tokenizer=_split("(a+)+$x"))))
    with pytest.raises(
        ConfigError, match=r"cannot encode document 1 of a batch: the tokenizers library failed: .*, up to"
    ):
        FileTokenizer(tmp_path / "tokenizer.json").encode_batch(["a" * 100_000])


def test_a_text_without_an_unknown_token_is_named_with_its_place(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
    rules = _rules(model=model, pre_tokenizer={"type": "Whitespace"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in (("1.txt", "a b"), ("2.txt", "a b a new word b"), ("3.txt", "b")):
        (corpus / name).write_text(text)
    settings = DataSettings(corpus=str(corpus), tokenizer=str(tmp_path / "tokenizer.json"))
    told = (
        r"cannot encode document 1 of .*2\.txt: WordLevel error: Missing \[UNK\].*, up to character 7 \(`a b a n`\); "
    )
    with pytest.raises(ConfigError, match=told) as found:
        prepare_tokens(settings, tmp_path)
    assert "\n" not in str(found.value)
    with pytest.raises(ConfigError, match=r"which cannot encode the document of the stream that begins with `a new`"):
        encode(FileTokenizer(tmp_path / "tokenizer.json"), ["a", "a new"])


def test_dropout_is_switched_off_and_said(tmp_path: Path) -> None:
    model = {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(_rules(model=model)))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode_batch(["aa" * 1000])[0].tolist() == [1] * 1000
    assert any("dropout 0.5 is switched off" in note for note in tokenizer.notes)
