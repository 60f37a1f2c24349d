"""The lookup drafter against a search from scratch."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.errors import InvalidArgumentError
from hsdopt.runtime.lookup import Bigrams, Lookup

texts = st.lists(st.integers(0, 3), max_size=40)
lookups = st.builds(
    Lookup,
    max_ngram=st.integers(2, 5),
    min_ngram=st.integers(1, 2),
    occurrence=st.sampled_from(["latest", "earliest"]),
    semantics=st.sampled_from(["paper", "reference"]),
    bigrams=st.lists(texts, max_size=3).map(Bigrams.of),
)


def searched(text: list[int], lookup: Lookup, prompt_length: int, length: int) -> list[int]:
    """A proposal by scanning the whole text for every n-gram: the oracle."""
    matches = [
        (n, start)
        for n in range(lookup.max_ngram, lookup.min_ngram - 1, -1)
        for start in range(n, len(text))
        if text[start - n : start] == text[len(text) - n :]
    ]
    in_prompt = [match for match in matches if match[1] < prompt_length]
    if lookup.semantics == "reference" and in_prompt:
        matches = in_prompt
    if not matches:
        return lookup.bigrams.chain(text[-1], length) if text else []
    starts = [start for n, start in matches if n == matches[0][0]]
    latest = lookup.semantics == "paper" and lookup.occurrence == "latest"
    start = starts[-1 if latest else 0]
    grown = list(text)
    for index in range(length):
        grown.append(grown[start + index])
    return grown[len(text) :]


@settings(deadline=None, derandomize=True)
@given(lookup=lookups, prompt=texts, edits=st.lists(st.tuples(st.integers(0, 40), texts), max_size=5))
def test_an_index_that_grew_and_was_cropped_proposes_what_a_search_finds(
    lookup: Lookup, prompt: list[int], edits: list[tuple[int, list[int]]]
) -> None:
    session, text = lookup.session(), list(prompt)
    session.begin(prompt)
    kept = len(prompt)
    for keep, added in edits:
        session.crop(keep)
        session.extend(added)
        kept = min(kept, keep)
        text = [*text[:keep], *added]
        assert session.tokens == tuple(text)
        assert session.propose(7) == searched(text, lookup, kept, 7)
    session.crop(0)
    assert session._places == {}


@settings(deadline=None, derandomize=True)
@given(lookup=lookups, text=texts, other=texts)
def test_shorter_proposals_are_prefixes_and_follow_takes_any_text(
    lookup: Lookup, text: list[int], other: list[int]
) -> None:
    session, fresh = lookup.session(), lookup.session()
    session.follow(other)
    session.follow(text)
    fresh.extend(text)
    assert session.tokens == tuple(text)
    longest = session.propose(12)
    assert longest == fresh.propose(12)
    assert [session.propose(k) for k in range(13)] == [longest[:k] for k in range(13)]


@settings(deadline=None, derandomize=True)
@given(sequences=st.lists(texts, max_size=4))
def test_bigrams_hold_the_most_frequent_successor_and_of_equals_the_smallest(
    sequences: list[list[int]],
) -> None:
    pairs = Counter(pair for s in sequences for pair in pairwise(s))
    table = Bigrams.of(sequences)
    expected = {a: min((-n, b) for (x, b), n in pairs.items() if x == a)[1] for a, _ in pairs}
    assert dict(zip(table.previous.tolist(), table.following.tolist(), strict=True)) == expected
    again = Bigrams(np.array(table.previous), np.array(table.following))
    assert all(again.chain(token, 5) == table.chain(token, 5) for token in range(4))


def test_reference_semantics_search_the_prompt_first() -> None:
    prompt, output = [1, 2, 9, 9], [3, 4, 1, 2, 8, 4, 1, 2]
    paper, reference = Lookup().session(), Lookup(semantics="reference").session()
    for session in (paper, reference):
        session.begin(prompt)
        session.extend(output)
    assert paper.propose(3) == [8, 4, 1]  # after 4 1 2, the longest match
    assert reference.propose(3) == [9, 9, 3]  # after 1 2 in the prompt


def test_bigrams_chain_where_nothing_matches() -> None:
    session = Lookup(bigrams=Bigrams.of([[1, 2, 3, 4]])).session()
    assert session.propose(3) == []
    session.extend([9, 2])
    assert session.propose(5) == [3, 4]


def test_a_repeating_text_goes_on_repeating() -> None:
    session = Lookup().session()
    session.extend([1, 2, 3, 1, 2, 3])
    assert session.propose(7) == [1, 2, 3, 1, 2, 3, 1]


def test_cost_does_not_grow_with_the_text() -> None:
    rng = np.random.default_rng(0)

    def seconds(length: int) -> float:
        session = Lookup().session()
        session.extend(rng.integers(0, 500, length).tolist())
        times = []
        for _ in range(200):
            started = time.perf_counter()
            session.extend([1, 2, 3, 4])
            session.propose(8)
            session.crop(length)
            times.append(time.perf_counter() - started)
        return float(np.median(times))

    assert seconds(32_000) < 10 * seconds(1_000)  # 32 times the text; a search would take 32 times as long


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngram": 0}, "1 <= min_ngram <= max_ngram; got 1 and 0"),
        ({"min_ngram": 9}, "1 <= min_ngram <= max_ngram; got 9 and 8"),
        ({"occurrence": "any"}, "latest or earliest; got 'any'"),
        ({"semantics": "mine"}, "paper or reference; got 'mine'"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Lookup(**options)


def test_bad_lengths_and_arrays() -> None:
    session = Lookup().session()
    with pytest.raises(InvalidArgumentError, match="draft length of at least 0; got -1"):
        session.propose(-1)
    with pytest.raises(InvalidArgumentError, match="at least 0 to crop to; got -2"):
        session.crop(-2)
    with pytest.raises(InvalidArgumentError, match=r"the first rising, as bigrams; got shapes \(2,\) and \(2,\)"):
        Bigrams(np.array([2, 1]), np.array([1, 1]))
