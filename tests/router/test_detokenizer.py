"""Incremental text equals the decoding of all ids, however the ids are split over rounds."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from router.detokenizer import Detokenizer, StopScanner

TEXTS = [
    "Hello, world! def f(x): return x + 1",
    "naïve café — déjà vu… «ça va?»",
    "日本語のテキストと中文文本 한국어",
    "🎉🚀 emoji 👩‍👩‍👧‍👦 family 🇩🇪 flag",
    "a\u0301\u0323 combining, literal \ufffd here",
]


@functools.cache
def byte_bpe() -> Tokenizer:
    """Byte-level BPE of a few merges: most multi-byte characters span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Sentencepiece style: words carry their space in front, decoding strips the first one."""
    words = ["▁Hello", "▁world", "▁a", "b", "▁", "é", "▁日本", "!"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="!"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut ids into pieces of these sizes, over and over."""
    rest, out = list(ids), []
    for size in itertools.cycle(sizes):
        if not rest:
            return out
        out.append(rest[:size])
        rest = rest[size:]
    return out


def incremental(tokenizer: Tokenizer, parts: list[list[int]]) -> tuple[str, list[str]]:
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push(part) for part in parts]
    return "".join(shown) + detokenizer.flush(), shown


SPLITS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)), sizes=SPLITS)
def test_text_for_all_splits(text: str, sizes: list[int]) -> None:
    tokenizer = byte_bpe()
    ids = tokenizer.encode(text).ids
    whole, shown = incremental(tokenizer, pieces(ids, sizes))
    assert whole == tokenizer.decode(ids, skip_special_tokens=True) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown), "broken UTF-8 was shown"


@given(ids=st.lists(st.integers(0, 299), max_size=60), sizes=SPLITS)
def test_any_ids_for_all_splits(ids: list[int], sizes: list[int]) -> None:
    """Random ids: incomplete and invalid UTF-8, special tokens in between."""
    tokenizer = byte_bpe()
    whole, _ = incremental(tokenizer, pieces(ids, sizes))
    assert whole == tokenizer.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 7), max_size=30), sizes=SPLITS)
def test_spaces_of_sentencepiece_style_tokenizers(ids: list[int], sizes: list[int]) -> None:
    tokenizer = metaspace()
    whole, _ = incremental(tokenizer, pieces(ids, sizes))
    assert whole == tokenizer.decode(ids, skip_special_tokens=True)


def test_nothing_is_held_back_between_whole_characters() -> None:
    tokenizer = byte_bpe()
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer.encode("plain text").ids:
        assert detokenizer.push([token]) == tokenizer.decode([token])


def test_a_character_appears_when_its_last_byte_does() -> None:
    tokenizer = byte_bpe()
    ids = [tokenizer.token_to_id(c) for c in ("ð", "Ł", "İ", "¢")]  # bytes F0 9F 8E A2
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "🎢"]


def test_an_incomplete_character_at_the_end_is_shown_as_decoding_shows_it() -> None:
    tokenizer = byte_bpe()
    ids = tokenizer.encode("ok 日").ids[:-1]
    whole, _ = incremental(tokenizer, [[token] for token in ids])
    assert whole == tokenizer.decode(ids) == "ok \ufffd"


@pytest.mark.model
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=30)), sizes=SPLITS)
def test_smollm2_text(smollm2_tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = smollm2_tokenizer.encode(text).ids
    whole, _ = incremental(smollm2_tokenizer, pieces(ids, sizes))
    assert whole == smollm2_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=40), sizes=SPLITS)
def test_smollm2_any_ids(smollm2_tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    whole, _ = incremental(smollm2_tokenizer, pieces(ids, sizes))
    assert whole == smollm2_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


# --- stop strings -------------------------------------------------------------------------------


def scan(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    shown = ""
    for part in parts:
        safe, stopped = scanner.push(part)
        shown += safe
        if stopped:
            return shown, True
    return shown + scanner.flush(), False


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the first stop string to be complete wins, the longest if several."""
    for end in range(len(text) + 1):
        hits = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: min(hits)], True
    return text, False


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    sizes=SPLITS,
)
def test_stop_strings_for_all_splits(text: str, stops: list[str], sizes: list[int]) -> None:
    parts = ["".join(map(chr, part)) for part in pieces([ord(c) for c in text], sizes)]
    assert scan(stops, parts) == reference(stops, text)


def test_only_a_tail_that_may_still_match_is_held_back() -> None:
    scanner = StopScanner(["STOP", "TOY"])
    assert scanner.push("abc STO") == ("abc ", False)
    assert scanner.push("R") == ("STOR", False)
    assert scanner.push("TO") == ("", False)
    assert scanner.flush() == "TO"
